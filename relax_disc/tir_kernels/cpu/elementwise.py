"""CPU rule: kernels without reductions run as one parallel, vectorised pass over memory.

Producers are inlined; several outputs over one domain (an optimizer's parameter and states) are
computed together.  For each element, or vector of elements, all reads come before all writes, so
that an output may overlay an input that is read at the written index only.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import Element, Inliner, collapse
from relax_disc.analysis.kernels.stages import Axis, Stage, constant, read_stages, same_expr
from relax_disc.tir_kernels.binding import keep
from relax_disc.tir_kernels.flat import FlatBuffers, index_const, product
from relax_disc.tir_kernels.hoist import hoist
from relax_disc.tir_kernels.loops import (
    DEFAULTS,
    LANES,
    Scheduled,
    Settings,
    TunedRule,
    decode,
    group_extent,
    group_mapping,
    loop,
    sequence,
    vector_loop,
    with_body,
)
from relax_disc.tir_kernels.vectorizable import moves_in_vectors, part_of, segments, vectorizable

# Below this many elements starting the threads costs more than the work (2-5 us).
SERIAL_ELEMENTS = 8192
# Attribute of a kernel whose sizes are dims that never make more elements than that.
FEW_ELEMENTS = "relax_disc.few_elements"
# Attribute of a kernel whose outputs have nothing in common but the launch (on CUDA): how many
# belong together, a number for each such group.
APART = "relax_disc.outputs_apart"


class Elementwise(TunedRule):
    """Schedule rule for kernels without reductions."""

    tunes = ("lanes",)

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when it is another rule's."""
        kernel = read_stages(func)
        if kernel is None or any(stage.combiner is not None for stage in kernel.stages):
            return None
        inliner = Inliner(kernel, inline_outputs=True)
        if not inliner.inlinable:
            return None
        outputs = inliner.remaining(kernel)
        statements: list[Any] = []
        flat = FlatBuffers(bits=True)
        for together in same_domain(outputs):
            elements = inliner.elements(together)
            statements += emit_elements(
                elements, flat, FEW_ELEMENTS in (func.attrs or {}), self.settings
            )
        return with_body(func, [*flat.declarations(), *statements])


def same_domain(stages: list[Stage]) -> list[list[Stage]]:
    """Group consecutive stages that run over equal extents."""
    groups: list[list[Stage]] = []
    for stage in stages:
        previous = groups[-1][0] if groups else None
        if previous is not None and same_expr(
            [axis.extent for axis in previous.axes], [axis.extent for axis in stage.axes]
        ):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def emit_elements(
    elements: list[Element], flat: FlatBuffers, few: bool, settings: Settings
) -> list[Any]:
    """Make the loops that compute elements over one domain; of `few` elements: on one thread."""
    stage = elements[0].stage
    axes = [axis for axis in stage.axes if constant(axis.extent) != 1]
    unit = unit_mapping(stage)
    if not axes:
        return [emit_element(elements, flat, unit)]
    expressions = [expr for element in elements for expr in element.expressions]
    stores = [[element.stage.buffer, *element.stage.indices] for element in elements]
    *outer, inner = collapse(axes, expressions, stores)
    total = constant(product([axis.extent for axis in axes]))
    rows = constant(product([group_extent(group) for group in outer]))
    spread = not few and (total is None or total > SERIAL_ELEMENTS)
    spread_inner = spread and rows is not None and rows < LANES

    def row(mapping: dict[Any, Any]) -> list[Any]:
        return emit_row(elements, inner, flat, {**unit, **mapping}, spread_inner, settings)

    return emit_outer(outer, row, spread and not spread_inner)


def unit_mapping(stage: Stage) -> dict[Any, Any]:
    """Map the axes of extent 1 of a stage to 0."""
    mapping: dict[Any, Any] = {}
    for axis in stage.axes:
        if constant(axis.extent) == 1:
            mapping.update(group_mapping([axis], index_const(0)))
    return mapping


def emit_outer(outer: list[list[Axis]], row: Any, spread: bool) -> list[Any]:
    """Make one (parallel) loop over all outer groups and run ``row(mapping)`` in it."""
    if not outer:
        return row({})
    extents = [group_extent(group) for group in outer]

    def body(index: Any) -> Any:
        statements, indices = decode(index, extents, "row")
        mapping: dict[Any, Any] = {}
        for group, position in zip(outer, indices, strict=True):
            mapping.update(group_mapping(group, position))
        return sequence([*statements, *row(mapping)])

    kind = tirx.ForKind.PARALLEL if spread else tirx.ForKind.SERIAL
    return [loop("row", product(extents), body, kind)]


def emit_row(
    elements: list[Element],
    inner: list[Axis],
    flat: FlatBuffers,
    mapping: dict[Any, Any],
    spread: bool = False,
    settings: Settings = DEFAULTS,
) -> list[Any]:
    """Make the innermost loop of elements, after the values that are fixed along it."""
    fixed, elements = hoist(elements, {axis.var for axis in inner})
    mapping = dict(mapping)
    binds: list[Any] = []
    for var, expr in fixed:
        made, mapping[var] = keep(str(var.name), flat.rewrite(expr, mapping))
        binds += made

    def body(elements: list[Element], index: Any) -> Any:
        return emit_element(elements, flat, {**mapping, **group_mapping(inner, index)})

    return binds + emit_inner(inner, elements, body, spread, settings.lanes)


def emit_inner(
    inner: list[Axis], elements: list[Element], body: Any, spread: bool, lanes: int
) -> list[Any]:
    """Make the innermost loop, vectorised where the elements allow it."""
    extent = group_extent(inner)

    def whole(index: Any) -> Any:
        return body(elements, index)

    var = inner[-1].var
    in_vectors = all(moves_in_vectors(element) for element in elements)
    expressions = [expr for element in elements for expr in element.expressions]
    if in_vectors and vectorizable(expressions, var):
        return vector_loop("column", extent, whole, lanes=lanes, parallel=spread)
    parts = segments(expressions, inner) if in_vectors else None
    if parts is None:
        kind = tirx.ForKind.PARALLEL if spread else tirx.ForKind.SERIAL
        return [loop("column", extent, whole, kind)]
    statements = []
    for start, end in parts:

        def part(index: Any, start: int = start) -> Any:
            there = [part_of(element, var, start) for element in elements]
            return body(there, index_const(start) + index)

        statements += vector_loop("column", index_const(end - start), part, lanes=lanes)
    return statements


def emit_element(elements: list[Element], flat: FlatBuffers, mapping: dict[Any, Any]) -> Any:
    """Compute one element of each output: every read and value first, then the writes."""
    mapping = dict(mapping)
    binds: list[Any] = []
    stores: list[Any] = []

    for element in elements:
        for var, expr in element.lets:
            made, mapping[var] = keep(str(var.name), flat.rewrite(expr, mapping))
            binds += made
        value = flat.rewrite(element.value, mapping)
        if len(elements) > 1:
            made, value = keep(f"{element.stage.name}_result", value)
            binds += made
        buffer = element.stage.buffer
        indices = [flat.rewrite(index, mapping) for index in element.stage.indices]
        stores.append(flat.store(buffer, indices, value))
    return sequence([*binds, *stores])
