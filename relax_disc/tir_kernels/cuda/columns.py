"""CUDA rule: reductions along columns and what is computed of each; a block for some columns.

Gradients of biases and of norms' weights, statistics of a batch: a block takes as many columns as a
sector of memory has, whose threads take turns along them and add up by shuffles and in shared
memory, always in the same order.  Several sums of the same columns are one launch.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import collapse
from relax_disc.analysis.kernels.stages import constant, loads_of
from relax_disc.tir_kernels.cpu.reductions import RowKernel, read_rows, reads_along
from relax_disc.tir_kernels.cuda.rows import Row, overlaid_inputs, part_of
from relax_disc.tir_kernels.cuda.split import split_long
from relax_disc.tir_kernels.cuda.threads import WARP, at_groups, elements_count, launch, only_where
from relax_disc.tir_kernels.flat import FlatBuffers, index_const, product
from relax_disc.tir_kernels.loops import with_body

_THREADS = 512
_SECTOR = 32  # bytes
_SHORT = 32  # elements that one thread adds up
_MOST_PARTS = 64  # of a column, which one thread adds up


class Columns:
    """Schedule rule for kernels that reduce along columns and write a number for each."""

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool = False
    ) -> s_tir.Schedule | None:
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
        most = _shape(kernel, constant(count))

        def grid(kernel: RowKernel, part: Any = None, parts: int = 1, totals: bool = False) -> Any:
            threads, width = (_THREADS, _THREADS) if totals else most

            def body(block: Any, thread: Any) -> list[Any]:
                if width == threads:
                    column = block * width + thread
                    alone = Row(kernel, overlaid, flat, thread, threads, width)
                    inside = at_groups(groups, column, "column", alone.emit)
                    return [only_where(column < count, inside)]
                at, own = part_of(block, parts)
                column = at * width + tirx.FloorMod(thread, index_const(width))
                is_there = column < count
                tile = Row(kernel, overlaid, flat, thread, threads, width, is_there, own, parts)

                def emit(mapping: dict[Any, Any]) -> list[Any]:
                    return tile.emit(mapping if part is None else {**mapping, part: own})

                # Threads without a column read the last one, so that all of them meet at barriers.
                return at_groups(groups, tirx.Min(column, count - 1), "column", emit)

            return launch((count + (width - 1)) // width * parts, threads, body)

        threads, width = most
        columns = constant(count)
        blocks = None if columns is None else -(-columns // width)
        launches, scratch = split_long(kernel, blocks, threads // width, _MOST_PARTS, grid)
        return with_body(func, [*flat.declarations(), *launches], scratch)


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


def _shape(kernel: RowKernel, count: int | None) -> tuple[int, int]:
    """Threads of a block, and its columns.

    Columns are those of a sector, more where they do not lie in whole ones; short columns have a
    thread each.
    """
    reductions = [element for element in kernel.elements if element.stage.combiner is not None]
    lengths = [constant(product([x.extent for x in e.stage.reduced])) for e in reductions]
    if all(length is not None and length <= _SHORT for length in lengths):
        return _THREADS, _THREADS
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
    return _THREADS, width
