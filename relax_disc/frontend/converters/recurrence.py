"""Recurrent layers, which are traced whole."""

from __future__ import annotations

from typing import Any

from relax_disc import ops
from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter


@converts("relax_disc.recurrence.default")
def recurrence(
    emitter: Emitter,
    projected: Any,
    state: Any,
    weight: Any,
    bias: Any,
    kind: str,
    batch_first: bool,
    reverse: bool,
) -> Any:
    """The recurrent part of a layer."""
    options = {"kind": kind, "batch_first": batch_first, "reverse": reverse}
    return emitter.fields(ops.recurrence(projected, state, weight, bias, **options))


@converts("relax_disc.recurrence_backward.default")
def recurrence_backward(
    emitter: Emitter,
    grad_out: Any,
    grad_last: Any,
    state: Any,
    weight: Any,
    out: Any,
    reserve: Any,
    kind: str,
    batch_first: bool,
    reverse: bool,
) -> Any:
    """The gradient of the recurrent part of a layer."""
    options = {"kind": kind, "batch_first": batch_first, "reverse": reverse}
    call = ops.recurrence_backward(grad_out, grad_last, state, weight, out, reserve, **options)
    return emitter.fields(call)
