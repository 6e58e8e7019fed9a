"""What the CPU rules for reductions share: the rows, what is contiguous, the body of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from relax_disc.analysis.kernels.element import Element, Inliner, collapse, rename_axes
from relax_disc.analysis.kernels.stages import (
    Axis,
    Stage,
    StagedKernel,
    constant,
    loads_of,
    read_stages,
    same_expr,
)
from relax_disc.tir_kernels.binding import keep
from relax_disc.tir_kernels.cpu.elementwise import emit_element, emit_row, unit_mapping
from relax_disc.tir_kernels.flat import FlatBuffers, index_const
from relax_disc.tir_kernels.hoist import hoist
from relax_disc.tir_kernels.loops import (
    DEFAULTS,
    Accumulator,
    Settings,
    group_extent,
    group_mapping,
    loop,
    sequence,
)
from relax_disc.tir_kernels.vectorizable import uses_any, vectorizable


@dataclass(frozen=True, eq=False)
class RowKernel:
    """A kernel whose stages all run over the same rows, each row using its own values only."""

    kernel: StagedKernel
    # the shared axes (of extent other than 1); every stage uses these variables for them
    rows: tuple[Axis, ...]
    # reductions, each to one number a row, and outputs, in program order
    elements: tuple[Element, ...]


def read_rows(func: tirx.PrimFunc) -> RowKernel | None:
    """Read a kernel as a row kernel; None when it has no reduction or rows mix."""
    kernel = read_stages(func)
    if kernel is None or all(stage.combiner is None for stage in kernel.stages):
        return None
    inliner = Inliner(kernel, inline_outputs=False)
    if not inliner.inlinable:
        return None
    remaining = inliner.remaining(kernel)
    first = next(stage for stage in remaining if stage.combiner is not None)
    rows = tuple(axis for axis in first.spatial if constant(axis.extent) != 1)
    stages = [_on_rows(stage, rows) for stage in remaining]
    if any(stage is None for stage in stages):
        return None
    elements = tuple(inliner.element(stage) for stage in stages if stage is not None)
    row_vars = [axis.var for axis in rows]
    written = {element.stage.buffer: element.stage for element in elements}
    for element in elements:
        for expr in element.expressions:
            for load in loads_of(expr):
                writer = written.get(load.source)
                if writer is not None and not _reads_own_row(load, writer, row_vars):
                    return None
    return RowKernel(kernel, rows, elements)


def _on_rows(stage: Stage, rows: Sequence[Axis]) -> Stage | None:
    """Rename the leading axes of a stage to ``rows``; None when its extents differ."""
    large = [axis for axis in stage.spatial if constant(axis.extent) != 1]
    if len(large) < len(rows) or (stage.combiner is not None and len(large) != len(rows)):
        return None
    for axis, row in zip(large, rows, strict=False):
        if not same_expr(axis.extent, row.extent):
            return None
    mapping = {axis.var: row.var for axis, row in zip(large, rows, strict=False)}
    renamed = {axis.var: row for axis, row in zip(large, rows, strict=False)}
    axes = tuple(renamed.get(axis.var, axis) for axis in stage.axes)
    return rename_axes(stage, mapping, axes)


def _reads_own_row(load: Any, writer: Stage, row_vars: list[Any]) -> bool:
    for written, read in zip(writer.indices, load.indices, strict=True):
        if isinstance(written, tvm.ir.Var) and written in row_vars and not read.same_as(written):
            return False
    return True


def reads_along(element: Element) -> str:
    """Say whether memory is contiguous along the reduced axes (``"row"``) or the others.

    ``"column"`` is answered when the last axis that is written is also the last axis of something
    that is read anew along the reduced axes.
    """
    spatial = [axis.var for axis in element.stage.spatial if constant(axis.extent) != 1]
    reduced = {axis.var for axis in element.stage.reduced}
    if not spatial:
        return "row"
    for expr in element.expressions:
        for load in loads_of(expr):
            if not uses_any(load.indices, reduced):
                continue
            last = [
                index
                for index, extent in zip(load.indices, load.source.shape, strict=True)
                if constant(extent) != 1
            ][-1:]
            if last and last[0].same_as(spatial[-1]):
                return "column"
    return "row"


def emit_reduction(
    element: Element,
    flat: FlatBuffers,
    mapping: dict[Any, Any],
    name: str,
    settings: Settings = DEFAULTS,
) -> tuple[list[Any], Any]:
    """Reduce one row with vector lanes; return statements and the total as an expression."""
    stage = element.stage
    axes = [axis for axis in stage.reduced if constant(axis.extent) != 1]
    mapping = {**mapping, **unit_mapping(stage)}
    inner_vars = {axis.var for axis in axes}
    fixed, (element,) = hoist([element], inner_vars)
    binds = bind_lets(fixed, flat, mapping)
    groups = collapse(axes, element.expressions, []) if axes else []
    lanes = 1
    if groups and vectorizable(element.expressions, groups[-1][-1].var):
        lanes = reduction_lanes(group_extent(groups[-1]), settings)
    total = Accumulator(name, _combiner(stage), stage.init, lanes)

    def value_at(position: dict[Any, Any]) -> tuple[list[Any], Any]:
        return emit_value(element, flat, {**mapping, **position})

    def nest(level: int, position: dict[Any, Any]) -> Any:
        group = groups[level]
        extent = group_extent(group)
        if level == len(groups) - 1:
            return total.loops(
                f"{name}_at",
                extent,
                lambda index: value_at({**position, **group_mapping(group, index)}),
            )
        return loop(
            f"{name}_{level}",
            extent,
            lambda index: nest(level + 1, {**position, **group_mapping(group, index)}),
        )

    if groups:
        body = nest(0, {})
    else:
        statements, value = value_at({})
        body = sequence([*statements, total.add(index_const(0), value)])
    return [*binds, *total.start(), body, *total.finish()], total.total()


def reduction_lanes(extent: Any, settings: Settings = DEFAULTS) -> int:
    """Lanes for a sum over ``extent`` elements: a power of two, not more than there are."""
    count = constant(extent)
    lanes = settings.reduction_lanes
    while count is not None and lanes > max(count, 1):
        lanes //= 2
    return lanes


def _combiner(stage: Stage) -> Any:
    if stage.combiner is None:
        raise AssertionError(f"{stage.name} is no reduction")
    return stage.combiner


def bind_lets(
    lets: Sequence[tuple[Any, Any]], flat: FlatBuffers, mapping: dict[Any, Any]
) -> list[Any]:
    """Evaluate values and enter what stands for them in ``mapping``."""
    statements: list[Any] = []
    for var, expr in lets:
        made, mapping[var] = keep(str(var.name), flat.rewrite(expr, mapping))
        statements += made
    return statements


def emit_value(
    element: Element, flat: FlatBuffers, mapping: dict[Any, Any]
) -> tuple[list[Any], Any]:
    """Evaluate an element without storing it."""
    mapping = dict(mapping)
    statements = bind_lets(element.lets, flat, mapping)
    return statements, flat.rewrite(element.value, mapping)


def emit_output(
    element: Element, flat: FlatBuffers, mapping: dict[Any, Any], settings: Settings = DEFAULTS
) -> list[Any]:
    """Write what one row of an element-wise stage writes; ``mapping`` maps the row's axes."""
    stage = element.stage
    mapping = {**unit_mapping(stage), **mapping}
    axes = [axis for axis in stage.axes if axis.var not in mapping]
    if not axes:
        return [emit_element([element], flat, mapping)]
    groups = collapse(axes, element.expressions, [[stage.buffer, *stage.indices]])

    def nest(level: int, position: dict[Any, Any]) -> list[Any]:
        group = groups[level]
        if level == len(groups) - 1:
            return emit_row([element], group, flat, {**mapping, **position}, settings=settings)
        return [
            loop(
                f"part_{level}",
                group_extent(group),
                lambda index: sequence(
                    nest(level + 1, {**position, **group_mapping(group, index)})
                ),
            )
        ]

    return nest(0, {})
