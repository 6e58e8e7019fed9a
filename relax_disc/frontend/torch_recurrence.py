"""Torch operators that keep the recurrent part of RNN, GRU and LSTM layers whole.

As in :mod:`.torch_ops`: one node for the forward, one for the gradient, bodies that run eagerly.
The gradients of weights and biases are products over all steps, written in ordinary operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relax_disc.recurrence_kinds import KINDS
from relax_disc.vm_builtins.libraries import recurrence_steps

AutogradContext = Any


@torch.library.custom_op("relax_disc::recurrence", mutates_args=())
def recurrence(
    projected: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor,
    kind: str,
    batch_first: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction of a layer; see :func:`relax_disc.ops.recurrence`."""
    results = _results(projected, state, weight, kind)
    recurrence_steps.forward(projected, state, weight, bias, kind, batch_first, reverse, *results)
    return results


@recurrence.register_fake
def _(
    projected: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor,
    kind: str,
    batch_first: bool,
    reverse: bool,
) -> Any:
    return _results(projected, state, weight, kind)


def _results(
    projected: Tensor, state: Tensor, weight: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    first, second, width = *projected.shape[:2], weight.shape[1]
    return (
        projected.new_empty((first, second, width)),
        state.new_empty(state.shape),
        projected.new_empty((first, second, KINDS[kind].reserve * width)),
    )


@torch.library.custom_op("relax_disc::recurrence_backward", mutates_args=())
def recurrence_backward(
    grad_out: Tensor,
    grad_last: Tensor,
    state: Tensor,
    weight: Tensor,
    out: Tensor,
    reserve: Tensor,
    kind: str,
    batch_first: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients before the activations and of the first state."""
    results = _gradients(grad_out, state, weight, kind)
    inputs = (grad_out, grad_last, state, weight, out, reserve)
    recurrence_steps.backward(*inputs, kind, batch_first, reverse, *results)
    return results


@recurrence_backward.register_fake
def _(
    grad_out: Tensor,
    grad_last: Tensor,
    state: Tensor,
    weight: Tensor,
    out: Tensor,
    reserve: Tensor,
    kind: str,
    batch_first: bool,
    reverse: bool,
) -> Any:
    return _gradients(grad_out, state, weight, kind)


def _gradients(grad_out: Tensor, state: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    parts = KINDS[kind].gradients * weight.shape[1]
    return grad_out.new_empty((*grad_out.shape[:2], parts)), state.new_empty(state.shape)


def _save(ctx: AutogradContext, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, state, weight, _, ctx.kind, ctx.batch_first, ctx.reverse = inputs
    out, _, reserve = output
    ctx.mark_non_differentiable(reserve)
    ctx.save_for_backward(state, weight, out, reserve)


def _gradient(ctx: AutogradContext, grad_out: Tensor, grad_last: Tensor, _reserve: Tensor) -> Any:
    state, weight, out, reserve = ctx.saved_tensors
    gradients, grad_state = torch.ops.relax_disc.recurrence_backward(
        grad_out, grad_last, state, weight, out, reserve, ctx.kind, ctx.batch_first, ctx.reverse
    )
    width, axis = weight.shape[1], int(ctx.batch_first)
    recurrent = gradients[..., : weight.shape[0]]
    grad_weight = grad_bias = None
    if ctx.needs_input_grad[2]:
        first = state[0].unsqueeze(axis)
        # One step too long, then cut: a length less one would be a size of its own.
        states = torch.cat([out, first] if ctx.reverse else [first, out], axis)
        before = states.narrow(axis, int(ctx.reverse), out.shape[axis])
        grad_weight = recurrent.flatten(0, 1).t() @ before.flatten(0, 1)
    if ctx.needs_input_grad[3]:
        grad_bias = recurrent.sum((0, 1))
    grad_projected = gradients
    if ctx.kind == "gru":
        grad_projected = torch.cat([gradients[..., : 2 * width], gradients[..., 3 * width :]], -1)
    return grad_projected, grad_state, grad_weight, grad_bias, None, None, None


recurrence.register_autograd(_gradient, setup_context=_save)
