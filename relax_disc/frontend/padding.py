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
    if target.kind.name != "llvm":
        reason = f"there are no kernels for packed sequences on {target.kind.name} yet"
        return tuple(replace(each, padding=(PaddingReason("", "", reason),)) for each in captured)
    module, found = remove_padding(captured[0].module)
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
    tokens = parameters[0].ty.shape.values[1].name
    batch, length = padding.grid.batch.name, padding.grid.length.name
    shapes: tuple[tuple[int | str, ...], ...] = ((3, tokens), (f"{batch} + 1",))
    inputs = [
        InputSpec(parameter.name, "packing", role, "", -1, shape, "int64")
        for parameter, role, shape in zip(parameters, ("places", "starts"), shapes, strict=True)
    ]
    leaves = {spec.name: int(spec.target) for spec in captured.inputs if spec.kind == "batch"}
    needed = padding.needed
    return replace(
        captured,
        inputs=(*captured.inputs, *inputs),
        packing=Packing(
            tokens,
            batch,
            length,
            _by_leaf(needed.counted, leaves),
            _by_leaf(needed.kept, leaves),
            needed.is_prefix,
        ),
    )


def _by_leaf(value: Any, leaves: Mapping[str, int]) -> Any:
    """Name what an expression reads by the leaves of the batch instead of by parameters."""
    if not isinstance(value, tuple):
        return value
    parts = tuple(_by_leaf(part, leaves) for part in value[1:])
    if value[0] == "load":
        return ("load", leaves[value[1]], *parts[1:])
    return (value[0], *parts)
