"""CUDA rule: reductions along columns and what is computed of each; a block for some columns.

Gradients of biases and of norms' weights, statistics of a batch: a block takes as many columns as a
sector of memory has, whose threads take turns along them and add up by shuffles and in shared
memory, always in the same order.  A thread has the columns of 16 bytes where they are aligned.
Several sums of the same columns are one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tvm
from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import Element, collapse
from relax_disc.analysis.kernels.stages import Axis, constant, loads_of
from relax_disc.tir_kernels.cpu.elementwise import unit_mapping
from relax_disc.tir_kernels.cpu.reductions import RowKernel, emit_value, read_rows, reads_along
from relax_disc.tir_kernels.cuda.rows import Row, overlaid_inputs, part_of
from relax_disc.tir_kernels.cuda.split import split_long
from relax_disc.tir_kernels.cuda.threads import WARP, at_groups, elements_count, launch, only_where
from relax_disc.tir_kernels.cuda.vectors import at_vector, vectors_of
from relax_disc.tir_kernels.flat import FlatBuffers, index_const, product
from relax_disc.tir_kernels.loops import Scheduled, group_extent, with_body

_THREADS = 512
_SECTOR = 32  # bytes
_SHORT = 32  # elements that one thread adds up
_FEW_PARTS = 8  # of a column, which one thread adds up
_MOST_PARTS = 64


class Columns:
    """Schedule rule for kernels that reduce along columns and write a number for each."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when it is another rule's."""
        kernel = read_rows(func)
        if kernel is None or not kernel.rows or not _is_by_columns(kernel):
            return None
        flat = FlatBuffers()
        overlaid = overlaid_inputs(func)
        expressions = [expr for element in kernel.elements for expr in element.expressions]
        stores = [[element.stage.buffer, *element.stage.indices] for element in kernel.elements]
        groups = collapse(kernel.rows, expressions, stores)
        count = elements_count(groups)
        most = _shape(kernel, constant(count), _lanes(kernel, groups))

        def grid(kernel: RowKernel, part: Any = None, parts: int = 1, totals: bool = False) -> Any:
            size = constant(count)
            threads, width, lanes = _shape(kernel, size, 1, _FEW_PARTS) if totals else most
            side, units = width // lanes, count // lanes

            def body(block: Any, thread: Any) -> list[Any]:
                at, own = part_of(block, parts)
                is_alone = side == threads
                unit = at * side + (
                    thread if is_alone else tirx.FloorMod(thread, index_const(side))
                )
                is_there = unit < units
                tile = Row(
                    *(kernel, overlaid, flat, thread, threads, side),
                    *(None if is_alone else is_there, own, parts, lanes),
                )

                def emit(mapping: dict[Any, Any]) -> list[Any]:
                    return tile.emit(mapping if part is None else {**mapping, part: own})

                if not is_alone:
                    # Threads without a column read the last one, so that all meet at barriers.
                    unit = tirx.Min(unit, units - 1)
                if lanes == 1:
                    inside = at_groups(groups, unit, "column", emit)
                else:
                    inside = at_vector(groups, unit, lanes, tile.lane, emit)
                return [only_where(is_there, inside)] if is_alone else inside

            return launch((count + (width - 1)) // width * parts, threads, body)

        threads, width, lanes = most
        columns = constant(count)
        blocks = None if columns is None else -(-columns // width)
        turns, load_bytes = threads * lanes // width, 4 if lanes == 1 else 16
        launches, scratch = split_long(kernel, blocks, turns, _MOST_PARTS, grid, load_bytes)
        return with_body(func, [*flat.declarations(), *launches], scratch)


def _lanes(kernel: RowKernel, groups: Sequence[Sequence[Axis]]) -> int:
    """Columns side by side that a thread takes: as many as 16 bytes have, where that is proved."""
    extent, most = group_extent(groups[-1]), 8
    for element in kernel.elements:
        if element.stage.combiner is None:
            continue
        around = {axis.var: axis.var for axis in element.stage.reduced}
        vectors = vectors_of(groups, FlatBuffers(), partial(_term, element), around)
        if vectors is None or vectors.is_aligned is not None:
            return 1
        most = min(most, vectors.lanes)
    rest = tirx.floormod(extent, index_const(most))
    return most if tvm.sym.Analyzer().can_prove_equal(rest, index_const(0)) else 1


def _term(element: Element, flat: Any, mapping: dict[Any, Any]) -> list[Any]:
    """Evaluate what a reduction adds up."""
    statements, value = emit_value(element, flat, {**unit_mapping(element.stage), **mapping})
    return [*statements, tirx.Evaluate(value)]


def _is_by_columns(kernel: RowKernel) -> bool:
    rows = {axis.var for axis in kernel.rows}
    for element in kernel.elements:
        stage = element.stage
        if stage.combiner is not None:
            if reads_along(element) != "column":
                return False
        elif any(x.var not in rows and constant(x.extent) != 1 for x in stage.axes):
            return False
    return True


def _shape(
    kernel: RowKernel, count: int | None, lanes: int, short: int = _SHORT
) -> tuple[int, int, int]:
    """Threads of a block, its columns, and how many of these a thread has.

    Columns are those of a sector, more where they do not lie in whole ones; columns of at most
    ``short`` elements are a thread's alone.
    """
    reductions = [element for element in kernel.elements if element.stage.combiner is not None]
    lengths = [constant(product([x.extent for x in e.stage.reduced])) for e in reductions]
    if all(length is not None and length <= short for length in lengths):
        return _THREADS, _THREADS * lanes, lanes
    sizes = [
        load.source.dtype.bits // 8
        for element in reductions
        for expr in element.expressions
        for load in loads_of(expr)
    ]
    width = _SECTOR // min(sizes, default=4)
    if count is None or count % width:
        width = WARP
    while count is not None and width // 2 >= count:
        width //= 2
    return _THREADS, width, lanes
