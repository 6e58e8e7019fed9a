"""Cross-entropy of class indices and its gradient, without the log-probabilities.

The loss keeps one number a row, the log of the sum of exponentials; the gradient is
``softmax(logits) - one_hot(target)``, computed from the logits in one pass.
"""

from __future__ import annotations

from tvm import relax

from relax_disc.ops import registry

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: relax.Expr,
    target: relax.Expr,
    weight: relax.Expr | None = None,
    *,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> relax.Call:
    """Build ``relax_disc.cross_entropy``.

    Parameters
    ----------
    logits : relax.Expr
        ``[N, V]``.
    target : relax.Expr
        ``[N]``, int64 class indices; rows whose index is ``ignore_index`` do not count.
    weight : relax.Expr, optional
        ``[V]``, a factor for each class.
    ignore_index : int
        Index of the rows left out; PyTorch's default is -100.
    label_smoothing : float
        Share of the target spread evenly over the classes.
    reduction : {"mean", "sum", "none"}
        ``"mean"`` divides by the sum of the weights of the counted rows, as PyTorch does: NaN when
        there is none.

    Returns
    -------
    relax.Call
        Of type ``Tuple(loss, lse [N], count [])``: the loss is a scalar (``[N]`` for ``"none"``) in
        the logits' type; ``lse`` and ``count`` (what ``"mean"`` divides by) are float32, float64
        for float64 logits.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}.")
    attrs = _attrs(ignore_index, label_smoothing, reduction)
    args = [logits, target] if weight is None else [logits, target, weight]
    return registry.call("relax_disc.cross_entropy", args, attrs)


def cross_entropy_backward(
    grad_loss: relax.Expr,
    logits: relax.Expr,
    target: relax.Expr,
    lse: relax.Expr,
    count: relax.Expr,
    weight: relax.Expr | None = None,
    *,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> relax.Call:
    """Build ``relax_disc.cross_entropy_backward``: the gradient of the logits, ``[N, V]``.

    Parameters
    ----------
    grad_loss : relax.Expr
        Gradient of the loss, a scalar (``[N]`` for ``"none"``).
    logits, target, weight, ignore_index, label_smoothing, reduction
        As given to :func:`cross_entropy`.
    lse, count : relax.Expr
        Results of :func:`cross_entropy`.

    Returns
    -------
    relax.Call
        A tensor of the logits' type.
    """
    attrs = _attrs(ignore_index, label_smoothing, reduction)
    args = [grad_loss, logits, target, lse, count]
    if weight is not None:
        args.append(weight)
    return registry.call("relax_disc.cross_entropy_backward", args, attrs)


def _attrs(ignore_index: int, label_smoothing: float, reduction: str) -> dict[str, object]:
    return {
        "ignore_index": int(ignore_index),
        "label_smoothing": float(label_smoothing),
        "reduction": reduction,
    }


def _infer_cross_entropy(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    logits = registry.tensor_type(call.args[0], "relax_disc.cross_entropy: logits", 2)
    registry.tensor_type(call.args[1], "relax_disc.cross_entropy: target", 1)
    rows = registry.extents(logits)[0]
    statistics = registry.statistics_dtype(logits)
    loss_shape = [rows] if registry.attribute(call, "reduction") == "none" else []
    return relax.TupleType(
        [
            relax.TensorType(loss_shape, registry.dtype_name(logits)),
            relax.TensorType([rows], statistics),
            relax.TensorType([], statistics),
        ]
    )


def _infer_cross_entropy_backward(
    call: relax.Call, builder: relax.BlockBuilder
) -> relax.TensorType:
    return registry.tensor_type(call.args[1], "relax_disc.cross_entropy_backward: logits", 2)


registry.register(
    "relax_disc.cross_entropy", _infer_cross_entropy, "Cross-entropy of class indices."
)
registry.register(
    "relax_disc.cross_entropy_backward",
    _infer_cross_entropy_backward,
    "Gradient of the cross-entropy of class indices by the logits.",
)
