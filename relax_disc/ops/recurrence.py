"""The recurrent part of an RNN, GRU or LSTM layer, one direction, over a symbolic length.

The input's product with its weights is an ordinary product outside; the operator does what cannot
be done for all steps at once.  What the gradient needs is an explicit output, so that the planner
sees its size and may compute it again.
"""

from __future__ import annotations

from tvm import relax, tirx

from relax_disc.ops import registry
from relax_disc.recurrence_kinds import KINDS


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
        What a step computes; :data:`relax_disc.recurrence_kinds.KINDS` has the counts.
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
        before the activations, their order in :mod:`relax_disc.recurrence_kinds`.
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
