"""Leave the padding out of captured functions, and write down what their callers must give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tvm

from relax_disc.analysis.padding.demand import Padding
from relax_disc.frontend.spec import CapturedStep, InputSpec, Packing, PaddingReason
from relax_disc.transform.padding.remove_padding import remove_padding


def without_padding(
    captured: Sequence[CapturedStep], target: tvm.target.Target
) -> tuple[CapturedStep, ...]:
    """Rewrite the functions of one module to compute only the rows that they need.

    Functions of which that is not proved stay as they are, and say why
    (`CapturedStep.padding`).
    """
    module, found = remove_padding(captured[0].module, target.kind.name)
    return tuple(
        _described(replace(each, module=module), found[each.function]) for each in captured
    )


def _described(captured: CapturedStep, padding: Padding) -> CapturedStep:
    reasons = tuple(PaddingReason(each.line, each.what, each.reason) for each in padding.reasons)
    captured = replace(captured, padding=reasons)
    if padding.needed is None:
        return captured
    assert padding.grid is not None
    parameters = captured.module[captured.function].params[len(captured.inputs) :]
    leaves = {spec.name: int(spec.target) for spec in captured.inputs if spec.kind == "batch"}
    batch, times = padding.grid.sequences.name, padding.grid.times
    ends = f"{batch} + 1" if times == 1 else f"{times}*{batch} + 1"
    inputs, packings = list(captured.inputs), []
    for k, (length, needed) in enumerate(zip(padding.grid.lengths, padding.needed, strict=True)):
        places, starts = parameters[2 * k : 2 * k + 2]
        tokens = places.ty.shape.values[1].name
        for parameter, role, shape in (
            (places, "places", (3, tokens)),
            (starts, "starts", (ends,)),
        ):
            inputs.append(InputSpec(parameter.name, "packing", role, "", -1, tuple(shape), "int64"))
        found = needed.counted, needed.kept, needed.shown
        counted, kept, shown = (_by_leaf(each, leaves) for each in found)
        which = counted, kept, needed.is_prefix, shown, needed.is_near, times
        packings.append(Packing(tokens, batch, length.name, *which))
    return replace(captured, inputs=tuple(inputs), packings=tuple(packings))


def _by_leaf(value: Any, leaves: Mapping[str, int]) -> Any:
    """Name what an expression reads by the leaves of the batch instead of by parameters."""
    if not isinstance(value, tuple):
        return value
    parts = tuple(_by_leaf(part, leaves) for part in value[1:])
    if value[0] == "load":
        return ("load", leaves[value[1]], *parts[1:])
    return (value[0], *parts)
