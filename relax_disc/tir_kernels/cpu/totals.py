"""CPU rule: a reduction to one number, or to a few, spread over the threads.

The elements are cut into a fixed number of chunks, so that the order of the sum depends on the
shape alone and the result is the same for any number of threads.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import Element, collapse
from relax_disc.analysis.kernels.stages import constant
from relax_disc.tir_kernels.binding import keep
from relax_disc.tir_kernels.cpu.elementwise import SERIAL_ELEMENTS, emit_outer, unit_mapping
from relax_disc.tir_kernels.cpu.reductions import (
    RowKernel,
    bind_lets,
    emit_output,
    emit_value,
    read_rows,
    reads_along,
    reduction_lanes,
)
from relax_disc.tir_kernels.cpu.rows import finished_stage, with_totals
from relax_disc.tir_kernels.flat import FlatBuffers, as_index, index_const, product
from relax_disc.tir_kernels.hoist import hoist
from relax_disc.tir_kernels.loops import (
    Accumulator,
    Scheduled,
    Settings,
    TunedRule,
    decode,
    group_extent,
    group_mapping,
    loop,
    sequence,
    with_body,
)
from relax_disc.tir_kernels.vectorizable import vectorizable

# Also the most threads that can help.  64 partial sums cost nothing to add up.
CHUNKS = 64
# More rows than this keep the threads busy by themselves (`Rows`).
_MOST_ROWS = 8


class Totals(TunedRule):
    """Schedule rule for one reduction with (almost) nothing left of its operand."""

    tunes = ("reduction_lanes",)

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when it is another rule's."""
        kernel = read_rows(func)
        if kernel is None:
            return None
        rows = constant(product([axis.extent for axis in kernel.rows]))
        first, *rest = kernel.elements
        stage = first.stage
        size = constant(product([axis.extent for axis in stage.reduced]))
        if (
            rows is None
            or rows > _MOST_ROWS
            or (size is not None and size <= SERIAL_ELEMENTS)
            or stage.combiner is None
            or reads_along(first) == "column"
            or any(element.stage.combiner is not None for element in rest)
            or any(_is_larger(element, len(kernel.rows)) for element in rest)
        ):
            return None
        flat = FlatBuffers(bits=True)
        groups = [[axis] for axis in kernel.rows]
        statements = emit_outer(
            groups, lambda row: _emit_total(kernel, flat, row, self.settings), False
        )
        return with_body(func, [*flat.declarations(), *statements])


def _is_larger(element: Element, rows: int) -> bool:
    return len([axis for axis in element.stage.axes if constant(axis.extent) != 1]) > rows


def _emit_total(
    kernel: RowKernel, flat: FlatBuffers, mapping: dict[Any, Any], settings: Settings
) -> list[Any]:
    first, *rest = kernel.elements
    stage = first.stage
    mapping = {**unit_mapping(stage), **mapping}
    axes = [axis for axis in stage.reduced if constant(axis.extent) != 1]
    fixed, (first,) = hoist([first], {axis.var for axis in axes})
    binds = bind_lets(fixed, flat, mapping)
    groups = collapse(axes, first.expressions, [])
    partial = tirx.decl_buffer((CHUNKS,), str(stage.init.ty.dtype), f"{stage.name}_partial")
    combiner = stage.combiner or "add"

    def value_at(position: dict[Any, Any]) -> tuple[list[Any], Any]:
        return emit_value(first, flat, {**mapping, **position})

    def chunk(index: Any) -> Any:
        body, total = _sum_chunk(kernel, groups, first, index, value_at, settings)
        return sequence([*body, tirx.BufferStore(partial, total, [index])])

    total = Accumulator(f"{stage.name}_total", combiner, stage.init, 1)

    def join(index: Any) -> Any:
        return total.add(index_const(0), tirx.BufferLoad(partial, [index]))

    var = tirx.Var(stage.name, str(stage.init.ty.dtype))
    kept, mapping[var] = keep(stage.name, total.total())
    statements = [
        *binds,
        tirx.AllocBuffer(partial),
        loop("chunk", index_const(CHUNKS), chunk, tirx.ForKind.PARALLEL),
        *total.start(),
        loop("chunk", index_const(CHUNKS), join),
        *kept,
    ]
    if stage.buffer in kernel.kernel.outputs:
        statements += emit_output(Element(finished_stage(stage), (), var), flat, mapping, settings)
    for element in rest:
        statements += emit_output(
            with_totals(element, {stage.buffer: var}), flat, mapping, settings
        )
    return statements


def _sum_chunk(
    kernel: RowKernel,
    groups: list[Any],
    element: Element,
    index: Any,
    value_at: Any,
    settings: Settings,
) -> tuple[list[Any], Any]:
    """Sum one chunk of the operand: a range of the only group, or of the fused outer groups."""
    stage = element.stage
    *outer, inner = groups
    lanes = 1
    if vectorizable(element.expressions, inner[-1].var):
        lanes = reduction_lanes(group_extent(inner), settings)
    total = Accumulator(f"{stage.name}_chunk", stage.combiner or "add", stage.init, lanes)
    extents = [group_extent(group) for group in outer]
    whole = as_index(product(extents) if outer else group_extent(inner))
    # Whole vectors a chunk, so that only the last has a rest.
    unit = 1 if outer else lanes
    step = (whole + (CHUNKS * unit - 1)) // (CHUNKS * unit) * unit
    start = index * step
    count = tirx.max(tirx.min(step, whole - start), index_const(0))
    length = tirx.Var("length", "int64")

    def at_inner(position: dict[Any, Any], base: Any, extent: Any) -> Any:
        return total.loops(
            "at", extent, lambda at: value_at({**position, **group_mapping(inner, base + at)})
        )

    def at_outer(at: Any) -> Any:
        statements, indices = decode(start + at, extents, "outer")
        position: dict[Any, Any] = {}
        for group, place in zip(outer, indices, strict=True):
            position.update(group_mapping(group, place))
        return sequence([*statements, at_inner(position, index_const(0), group_extent(inner))])

    body = loop("outer", length, at_outer) if outer else at_inner({}, start, length)
    statements = [tirx.Bind(length, count), *total.start(), body, *total.finish()]
    return statements, total.total()
