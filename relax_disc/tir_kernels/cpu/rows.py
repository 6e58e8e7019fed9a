"""CPU rule: reductions along rows and what follows them, one row after the other.

Softmax, log-sum-exp, norms and their gradients: each row is read from memory once and stays in
the nearest cache for the stages that follow; rows are spread over the threads.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import Element, collapse
from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.analysis.kernels.stages import Stage, constant
from relax_disc.tir_kernels.binding import keep
from relax_disc.tir_kernels.cpu.elementwise import SERIAL_ELEMENTS, emit_outer
from relax_disc.tir_kernels.cpu.reductions import (
    RowKernel,
    emit_output,
    emit_reduction,
    read_rows,
    reads_along,
)
from relax_disc.tir_kernels.flat import FlatBuffers, product
from relax_disc.tir_kernels.loops import Scheduled, Settings, TunedRule, with_body


class Rows(TunedRule):
    """Schedule rule for row kernels."""

    tunes = ("lanes", "reduction_lanes")

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when it is another rule's."""
        rows = read_rows(func)
        if rows is None or any(
            reads_along(element) == "column"
            for element in rows.elements
            if element.stage.combiner is not None
        ):
            return None
        flat = FlatBuffers(bits=True)
        statements = emit_rows(rows, flat, self.settings)
        return with_body(func, [*flat.declarations(), *statements])


def emit_rows(rows: RowKernel, flat: FlatBuffers, settings: Settings) -> list[Any]:
    """Make the loop over rows."""
    elements = rows.elements

    def row(mapping: dict[Any, Any]) -> list[Any]:
        return emit_row_stages(rows, flat, mapping, settings)

    if not rows.rows:
        return row({})
    expressions = [expr for element in elements for expr in element.expressions]
    stores = [[element.stage.buffer, *element.stage.indices] for element in elements]
    groups = collapse(rows.rows, expressions, stores)
    return emit_outer(groups, row, _is_large(elements))


def emit_row_stages(
    rows: RowKernel, flat: FlatBuffers, mapping: dict[Any, Any], settings: Settings
) -> list[Any]:
    """Compute all stages of one row; ``mapping`` gives the row."""
    statements: list[Any] = []
    mapping = dict(mapping)
    totals: dict[Any, Any] = {}
    outputs = set(rows.kernel.outputs)
    for element in rows.elements:
        element = with_totals(element, totals)
        stage = element.stage
        if stage.combiner is None:
            statements += emit_output(element, flat, mapping, settings)
            continue
        reduced, total = emit_reduction(element, flat, mapping, f"{stage.name}_total", settings)
        var = tirx.Var(stage.name, str(total.ty.dtype))
        kept, value = keep(stage.name, total)
        statements += [*reduced, *kept]
        totals[stage.buffer] = var
        mapping[var] = value
        if stage.buffer in outputs:
            written = Element(finished_stage(stage), (), var)
            statements += emit_output(written, flat, mapping, settings)
    return statements


def finished_stage(stage: Stage) -> Stage:
    """Describe the writing of a reduction's result as an element-wise stage."""
    return Stage(stage.name, stage.spatial, stage.buffer, stage.indices, stage.value)


def with_totals(element: Element, totals: dict[Any, Any]) -> Element:
    """Replace reads of finished reductions by their values."""
    if not totals:
        return element

    def on_load(load: Any, mutator: Any) -> Any:
        if load.source in totals:
            return totals[load.source]
        return mutator.default_mutate(load)

    def run(expr: Any) -> Any:
        return mutate(expr, (tvm.ir.TensorLoad, on_load))

    lets = tuple((var, run(expr)) for var, expr in element.lets)
    return Element(element.stage, lets, run(element.value))


def _is_large(elements: tuple[Element, ...]) -> bool:
    sizes = [
        constant(product([axis.extent for axis in element.stage.axes])) for element in elements
    ]
    return any(size is None or size > SERIAL_ELEMENTS for size in sizes)
