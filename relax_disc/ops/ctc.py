"""Connectionist temporal classification and its gradient, padded targets with lengths."""

from __future__ import annotations

from tvm import relax, tirx

from relax_disc.ops import registry


def ctc_loss(
    log_probs: relax.Expr,
    targets: relax.Expr,
    input_lengths: relax.Expr,
    target_lengths: relax.Expr,
    *,
    blank: int,
) -> relax.Call:
    """Build ``relax_disc.ctc_loss``.

    Parameters
    ----------
    log_probs : relax.Expr
        ``[T, N, C]``, float32 or float64.
    targets : relax.Expr
        ``[N, S]``, int64 labels, padded by anything.
    input_lengths, target_lengths : relax.Expr
        ``[N]``, int64.
    blank : int
        The label of no label.

    Returns
    -------
    relax.Call
        Of type ``Tuple(loss [N], alpha [N, T, 2 S + 1])``: the loss is infinite where no path
        gives the target; ``alpha`` is what the gradient needs.
    """
    args = [log_probs, targets, input_lengths, target_lengths]
    return registry.call("relax_disc.ctc_loss", args, {"blank": int(blank)})


def ctc_loss_backward(
    grad: relax.Expr,
    log_probs: relax.Expr,
    targets: relax.Expr,
    input_lengths: relax.Expr,
    target_lengths: relax.Expr,
    loss: relax.Expr,
    alpha: relax.Expr,
    *,
    blank: int,
) -> relax.Call:
    """Build ``relax_disc.ctc_loss_backward``: the gradient of ``log_probs``.

    Parameters
    ----------
    grad : relax.Expr
        Gradient by ``loss``, ``[N]``.
    log_probs, targets, input_lengths, target_lengths, blank
        As given to :func:`ctc_loss`.
    loss, alpha : relax.Expr
        Results of :func:`ctc_loss`.
    """
    args = [grad, log_probs, targets, input_lengths, target_lengths, loss, alpha]
    return registry.call("relax_disc.ctc_loss_backward", args, {"blank": int(blank)})


def _infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    log_probs = registry.tensor_type(call.args[0], "relax_disc.ctc_loss: log_probs", 3)
    targets = registry.tensor_type(call.args[1], "relax_disc.ctc_loss: targets", 2)
    steps, count, _ = registry.extents(log_probs)
    labels = registry.extents(targets)[1]
    one, two = (tirx.IntImm("int64", k) for k in (1, 2))
    states = labels * two + one
    dtype = registry.dtype_name(log_probs)
    return relax.TupleType(
        [relax.TensorType([count], dtype), relax.TensorType([count, steps, states], dtype)]
    )


def _infer_backward(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    return registry.tensor_type(call.args[1], "relax_disc.ctc_loss_backward: log_probs", 3)


registry.register("relax_disc.ctc_loss", _infer, "Connectionist temporal classification.")
registry.register(
    "relax_disc.ctc_loss_backward",
    _infer_backward,
    "Gradient of connectionist temporal classification by the logarithms of probabilities.",
)
