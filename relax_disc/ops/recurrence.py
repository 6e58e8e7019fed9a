"""The recurrent part of an RNN, GRU or LSTM layer, one direction, over a symbolic length.

The input's product with its weights is an ordinary product outside; the operator does what cannot
be done for all steps at once.  What the gradient needs is an explicit output, so that the planner
sees its size and may compute it again.  The gradients of weights and biases are products over all
steps, written in ordinary operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tvm import relax

from relax_disc.ops import registry
from relax_disc.ops.recurrence_steps import KINDS, forward
from relax_disc.ops.registry import Kind

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


_OPTIONS = "str kind, bool batch_first, bool reverse"


def _results(
    projected: Kind, state: Kind, weight: Kind, *_: Kind, **attrs: Any
) -> tuple[Kind, ...]:
    first, second, width = *projected.shape[:2], weight.shape[1]
    reserve = Kind((first, second, width * KINDS[attrs["kind"]].reserve), projected.dtype)
    return Kind((first, second, width), projected.dtype), state, reserve


def _backward_results(
    grad: Kind, _: Kind, state: Kind, *__: Kind, **attrs: Any
) -> tuple[Kind, ...]:
    first, second, width = grad.shape
    return Kind((first, second, width * KINDS[attrs["kind"]].gradients), grad.dtype), state


recurrence_backward = registry.operator(
    "recurrence_backward(Tensor grad_out:3, Tensor grad_last, Tensor state:3, Tensor weight,"
    f" Tensor out, Tensor reserve, {_OPTIONS}) -> (Tensor, Tensor)",
    """Gradient of the recurrent part of an RNN, GRU or LSTM layer.

    ``grad_out``, ``grad_last``: gradients of the loss by ``out`` and ``last``. ``out``,
    ``reserve``: results of :func:`recurrence`. All else is as given to it.

    Of type ``Tuple(gradients [T, B, gradients H], grad_state [states, B, H])``: the gradients
    before the activations, their order in :mod:`relax_disc.ops.recurrence_steps`.
    """,
    _backward_results,
    choices={"kind": KINDS},
)


@registry.dispatches("relax_disc.recurrence", "relax_disc.recurrence_backward")
def dispatch(call: relax.Call, site: Site) -> relax.Expr:
    """Call the library, float32 and float64: there is no other form."""
    name = call.op.name.removeprefix("relax_disc.")
    kind, batch_first, reverse = (
        registry.attribute(call, key) for key in ("kind", "batch_first", "reverse")
    )
    flags = (tuple(KINDS).index(kind), int(batch_first), int(reverse))
    return site.call(name, [*call.args, *flags], list(site.original.ty.fields))


def _facts(formula: str, state: int) -> registry.LibraryFunction:
    """Count the recurrent products; the weight follows the state."""

    def flops(views: list[Any], numbers: list[int]) -> Any:
        del numbers
        rows = views[0].shape[0] * views[0].shape[1]
        return 2 * rows * registry.elements(views[state + 1].shape)

    def workspace(views: list[Any], numbers: list[int]) -> registry.Workspace:
        del numbers
        rows, width = views[state + 1].shape
        return formula, (views[state].shape[1], width, rows)

    def device_bytes(views: list[Any], numbers: list[Any], units: int) -> Any:
        """Bound the arrays of one step of `recurrence_steps`, each of all gates; cuBLAS aside."""
        del numbers, units
        gates = views[state].shape[1] * views[state + 1].shape[0]
        return _STEP_ARRAYS * gates * registry.itemsize(views[0].dtype) + registry.SMALL_BYTES

    return registry.LibraryFunction(flops=flops, workspace=workspace, device_bytes=device_bytes)


_STEP_ARRAYS = 6  # that are alive at once in a step at most, counted by the test of device memory
registry.LIBRARY["recurrence"] = _facts("recurrence", state=1)
registry.LIBRARY["recurrence_backward"] = _facts("recurrence_backward", state=2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, state, weight, _, ctx.kind, ctx.batch_first, ctx.reverse = inputs
    out, _, reserve = output
    ctx.mark_non_differentiable(reserve)
    ctx.save_for_backward(state, weight, out, reserve)


def _gradient(ctx: Any, grad_out: Tensor, grad_last: Tensor, _reserve: Tensor) -> Any:
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


recurrence = registry.operator(
    f"recurrence(Tensor projected:3, Tensor state:3, Tensor weight:2, Tensor bias:1, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
    """Recurrent part of an RNN, GRU or LSTM layer.

    ``projected``: input times input weights plus their bias: ``[T, B, gates H]``, ``[B, T, gates
    H]`` if ``batch_first``.  ``state``: first state ``[states, B, H]``: hidden, and for ``"lstm"``
    the cell.  ``weight``, ``bias``: of the recurrent product, ``[gates H, H]`` and ``[gates H]``,
    gates in PyTorch's order.  ``kind``: what a step computes, ``"rnn_tanh"``, ``"rnn_relu"``,
    ``"gru"`` or ``"lstm"``; :data:`relax_disc.ops.recurrence_steps.KINDS` has the counts.
    ``batch_first``, ``reverse``: order of the first two axes; whether time runs from the end to the
    start.

    Of type ``Tuple(out [T, B, H], last [states, B, H], reserve [T, B, reserve H])``.
    """,
    _results,
    choices={"kind": KINDS},
    gradient=(_gradient, _save),
)


@torch.library.impl("relax_disc::recurrence", ("CPU", "CUDA"))
def _computed(
    projected: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor,
    kind: str,
    batch_first: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute it on the example batch, whose data decide a branch."""
    width, lengths = weight.shape[1], projected.shape[:2]
    out, last = projected.new_empty(*lengths, width), torch.empty_like(state)
    reserve = projected.new_empty(*lengths, width * KINDS[kind].reserve)
    given = projected, state, weight, bias, kind, batch_first, reverse
    forward(*given, out, last, reserve)
    return out, last, reserve
