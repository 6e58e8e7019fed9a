"""Scaled dot-product attention and its gradient as one operator each.

``out = softmax(scale * q @ k^T + mask) @ v`` over tensors laid out ``[batch, heads, length, dim]``.
``k`` and ``v`` may have fewer heads than ``q`` (grouped heads): query head ``h`` uses key head
``h // (heads / key_heads)``.  The log of the sum of exponentials of each row is an explicit output,
so that the gradient needs nothing of the size ``length x length``
(Dao et al., FlashAttention, 2022, section 3).
"""

from __future__ import annotations

from tvm import relax

from relax_disc.ops import registry


def attention(
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    mask: relax.Expr | None = None,
    *,
    scale: float,
    is_causal: bool,
) -> relax.Call:
    """Build ``relax_disc.attention``.

    Parameters
    ----------
    q : relax.Expr
        ``[B, H, Tq, D]``.
    k : relax.Expr
        ``[B, Hk, Tk, D]`` with ``H`` divisible by ``Hk``.
    v : relax.Expr
        ``[B, Hk, Tk, Dv]``.
    mask : relax.Expr, optional
        Broadcastable to ``[B, H, Tq, Tk]``, rank 4; bool (True takes part) or added to the scores.
    scale : float
        Factor of the scores.
    is_causal : bool
        Row ``i`` sees columns ``j <= i`` (aligned to the top left, as PyTorch does).

    Returns
    -------
    relax.Call
        Of type ``Tuple(out [B, H, Tq, Dv], lse [B, H, Tq] float32)``; the ``lse`` of float64 inputs
        is float64.  A row that sees nothing has ``out = 0`` and ``lse = -inf``.
    """
    args = [q, k, v] if mask is None else [q, k, v, mask]
    attrs = {"scale": float(scale), "is_causal": bool(is_causal)}
    return registry.call("relax_disc.attention", args, attrs)


def attention_backward(
    grad_out: relax.Expr,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    out: relax.Expr,
    lse: relax.Expr,
    mask: relax.Expr | None = None,
    *,
    scale: float,
    is_causal: bool,
) -> relax.Call:
    """Build ``relax_disc.attention_backward``: the gradients of q, k and v, in their shapes.

    Parameters
    ----------
    grad_out : relax.Expr
        Gradient of the loss by ``out``, ``[B, H, Tq, Dv]``.
    q, k, v, mask, scale, is_causal
        As given to :func:`attention`.
    out, lse : relax.Expr
        The two results of :func:`attention`.

    Returns
    -------
    relax.Call
        Of type ``Tuple(dq, dk, dv)``; the mask gets no gradient.
    """
    args = [grad_out, q, k, v, out, lse]
    if mask is not None:
        args.append(mask)
    attrs = {"scale": float(scale), "is_causal": bool(is_causal)}
    return registry.call("relax_disc.attention_backward", args, attrs)


def _infer_attention(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    q, k, v = (
        registry.tensor_type(arg, f"relax_disc.attention: {name}", 4)
        for name, arg in zip("qkv", call.args[:3], strict=True)
    )
    if len(call.args) > 3:
        registry.tensor_type(call.args[3], "relax_disc.attention: mask", 4)
    if len({registry.dtype_name(kind) for kind in (q, k, v)}) != 1:
        raise TypeError(f"relax_disc.attention: q, k and v differ in type: {q}, {k}, {v}.")
    batch, heads, rows, _ = registry.extents(q)
    return relax.TupleType(
        [
            relax.TensorType([batch, heads, rows, registry.extents(v)[3]], registry.dtype_name(q)),
            relax.TensorType([batch, heads, rows], registry.statistics_dtype(q)),
        ]
    )


def _infer_attention_backward(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    return relax.TupleType(
        [
            registry.tensor_type(arg, f"relax_disc.attention_backward: {name}", 4)
            for name, arg in zip("qkv", call.args[1:4], strict=True)
        ]
    )


registry.register("relax_disc.attention", _infer_attention, "Scaled dot-product attention.")
registry.register(
    "relax_disc.attention_backward",
    _infer_attention_backward,
    "Gradients of scaled dot-product attention.",
)
