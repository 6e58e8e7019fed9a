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
from tvm import relax, tirx

from relax_disc.ops import registry
from relax_disc.ops.recurrence_steps import KINDS

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


def recurrence(
    projected: relax.Expr,
    state: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr,
    *,
    kind: str,
    batch_first: bool,
    reverse: bool,
) -> relax.Call:
    """Build ``relax_disc.recurrence``.

    Parameters
    ----------
    projected : relax.Expr
        Input times input weights plus their bias: ``[T, B, gates H]``, ``[B, T, gates H]`` if
        ``batch_first``.
    state : relax.Expr
        First state ``[states, B, H]``: hidden, and for ``"lstm"`` the cell.
    weight, bias : relax.Expr
        Of the recurrent product, ``[gates H, H]`` and ``[gates H]``, gates in PyTorch's order.
    kind : {"rnn_tanh", "rnn_relu", "gru", "lstm"}
        What a step computes; :data:`relax_disc.ops.recurrence_steps.KINDS` has the counts.
    batch_first, reverse : bool
        Order of the first two axes; whether time runs from the end to the start.

    Returns
    -------
    relax.Call
        Of type ``Tuple(out [T, B, H], last [states, B, H], reserve [T, B, reserve H])``.
    """
    attrs = _attrs(kind, batch_first, reverse)
    return registry.call("relax_disc.recurrence", [projected, state, weight, bias], attrs)


def recurrence_backward(
    grad_out: relax.Expr,
    grad_last: relax.Expr,
    state: relax.Expr,
    weight: relax.Expr,
    out: relax.Expr,
    reserve: relax.Expr,
    *,
    kind: str,
    batch_first: bool,
    reverse: bool,
) -> relax.Call:
    """Build ``relax_disc.recurrence_backward``.

    Parameters
    ----------
    grad_out, grad_last : relax.Expr
        Gradients of the loss by ``out`` and ``last``.
    state, weight, kind, batch_first, reverse
        As given to :func:`recurrence`.
    out, reserve : relax.Expr
        Results of :func:`recurrence`.

    Returns
    -------
    relax.Call
        Of type ``Tuple(gradients [T, B, gradients H], grad_state [states, B, H])``: the gradients
        before the activations, their order in :mod:`relax_disc.ops.recurrence_steps`.
    """
    args = [grad_out, grad_last, state, weight, out, reserve]
    return registry.call("relax_disc.recurrence_backward", args, _attrs(kind, batch_first, reverse))


def _attrs(kind: str, batch_first: bool, reverse: bool) -> dict[str, object]:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {tuple(KINDS)}, got {kind!r}.")
    return {"kind": kind, "batch_first": bool(batch_first), "reverse": bool(reverse)}


def _infer_recurrence(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    projected, state, weight = (
        registry.tensor_type(arg, f"relax_disc.recurrence: {name}", rank)
        for arg, name, rank in zip(
            call.args[:3], ("projected", "state", "weight"), (3, 3, 2), strict=True
        )
    )
    registry.tensor_type(call.args[3], "relax_disc.recurrence: bias", 1)
    first, second, _ = registry.extents(projected)
    width = registry.extents(weight)[1]
    reserve = KINDS[registry.attribute(call, "kind")].reserve
    dtype = registry.dtype_name(projected)
    return relax.TupleType(
        [
            relax.TensorType([first, second, width], dtype),
            state,
            relax.TensorType([first, second, _times(reserve, width)], dtype),
        ]
    )


def _infer_recurrence_backward(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    grad = registry.tensor_type(call.args[0], "relax_disc.recurrence_backward: grad_out", 3)
    state = registry.tensor_type(call.args[2], "relax_disc.recurrence_backward: state", 3)
    first, second, width = registry.extents(grad)
    parts = KINDS[registry.attribute(call, "kind")].gradients
    dtype = registry.dtype_name(grad)
    return relax.TupleType([relax.TensorType([first, second, _times(parts, width)], dtype), state])


def _times(count: int, width: tirx.PrimExpr) -> tirx.PrimExpr:
    if isinstance(width, tirx.IntImm):
        return tirx.IntImm("int64", count * int(width))
    return count * width


registry.register(
    "relax_disc.recurrence", _infer_recurrence, "Recurrent part of an RNN, GRU or LSTM layer."
)
registry.register(
    "relax_disc.recurrence_backward",
    _infer_recurrence_backward,
    "Gradient of the recurrent part of an RNN, GRU or LSTM layer.",
)


def _fake_recurrence(
    projected: Tensor, state: Tensor, weight: Tensor, bias: Tensor, kind: str, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    first, second, width = *projected.shape[:2], weight.shape[1]
    return (
        projected.new_empty((first, second, width)),
        state.new_empty(state.shape),
        projected.new_empty((first, second, KINDS[kind].reserve * width)),
    )


def _fake_recurrence_backward(
    grad_out: Tensor, grad_last: Tensor, state: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    parts = KINDS[rest[2]].gradients * weight.shape[1]
    return grad_out.new_empty((*grad_out.shape[:2], parts)), state.new_empty(state.shape)


_OPTIONS = ("kind", "batch_first", "reverse")
registry.traced(
    "recurrence_backward(Tensor grad_out, Tensor grad_last, Tensor state, Tensor weight,"
    " Tensor out, Tensor reserve, str kind, bool batch_first, bool reverse) -> (Tensor, Tensor)",
    _fake_recurrence_backward,
    recurrence_backward,
    _OPTIONS,
)


@registry.dispatches("relax_disc.recurrence", "relax_disc.recurrence_backward")
def dispatch(call: relax.Call, site: Site) -> relax.Expr:
    """Call the library, float32 and float64: there is no other form."""
    name = call.op.name.removeprefix("relax_disc.")
    kind, batch_first, reverse = (registry.attribute(call, key) for key in _OPTIONS)
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


registry.traced(
    "recurrence(Tensor projected, Tensor state, Tensor weight, Tensor bias, str kind,"
    " bool batch_first, bool reverse) -> (Tensor, Tensor, Tensor)",
    _fake_recurrence,
    recurrence,
    _OPTIONS,
    gradient=(_gradient, _save),
)
