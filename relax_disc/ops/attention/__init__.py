"""Scaled dot-product attention and its gradient as one operator each.

``out = softmax(scale * q @ k^T + mask) @ v`` over tensors laid out ``[batch, heads, length, dim]``.
``k`` and ``v`` may have fewer heads than ``q`` (grouped heads): query head ``h`` uses key head
``h // (heads / key_heads)``.  The log of the sum of exponentials of each row is an explicit output,
so that the gradient needs nothing of the size ``length x length``
(Dao et al., FlashAttention, 2022, section 3).

Dropout of the weights, which PyTorch does between softmax and ``v``, is part of the operator: the
numbers are drawn where they are used (:mod:`relax_disc.ops.philox`), in the gradient once more.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from tvm import relax

from relax_disc.ops import registry


def attention(
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    mask: relax.Expr | None = None,
    rng: relax.Expr | None = None,
    *,
    scale: float,
    is_causal: bool,
    dropout: float = 0.0,
    stream: int = 0,
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
        Broadcastable to ``[B, H, Tq, Tk]``, rank 4; bool (True takes part) or added to the scores,
        where the least number of float32 hides a key as ``-inf`` does, but in a row of which all
        is hidden so: that takes the mean of ``v``, as in PyTorch's own arithmetic.
    rng : relax.Expr, optional
        Seed and offset of the random operators, int64 ``[2]``; present if there is dropout.
    scale : float
        Factor of the scores.
    is_causal : bool
        Row ``i`` sees columns ``j <= i`` (aligned to the top left, as PyTorch does).
    dropout : float
        Probability, in [0, 1), with which a weight is dropped; others grow by ``1 / (1 - p)``.
    stream : int
        Which operator of the model draws: numbers are those of a tensor ``[B, H, Tq, Tk]``.

    Returns
    -------
    relax.Call
        Of type ``Tuple(out [B, H, Tq, Dv], lse [B, H, Tq] float32)``; the ``lse`` of float64 inputs
        is float64.  A row that sees nothing has ``out = 0`` and ``lse = -inf``.
    """
    args = [q, k, v, *_there(mask, rng)]
    attrs = attributes(scale, is_causal, dropout, stream)
    return registry.call("relax_disc.attention", args, attrs)


def attributes(scale: float, is_causal: bool, dropout: float, stream: int) -> dict[str, Any]:
    """Attributes of all operators of attention."""
    known: dict[str, Any] = {"scale": float(scale), "is_causal": bool(is_causal)}
    return known | {"dropout": float(dropout), "stream": int(stream)}


def _there(*operands: relax.Expr | None) -> list[relax.Expr]:
    return [operand for operand in operands if operand is not None]


def optional_operands(call: relax.Call, count: int) -> tuple[list[relax.Expr], list[relax.Expr]]:
    """Split what comes after the first ``count`` operands: a mask or none, a state or none."""
    rest = list(call.args[count:])
    drops = float(registry.attribute(call, "dropout")) > 0
    return (rest[:-1], rest[-1:]) if drops else (rest, [])


def attention_backward(
    grad_out: relax.Expr,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    out: relax.Expr,
    lse: relax.Expr,
    mask: relax.Expr | None = None,
    rng: relax.Expr | None = None,
    *,
    scale: float,
    is_causal: bool,
    dropout: float = 0.0,
    stream: int = 0,
) -> relax.Call:
    """Build ``relax_disc.attention_backward``: the gradients of q, k and v, in their shapes.

    Parameters
    ----------
    grad_out : relax.Expr
        Gradient of the loss by ``out``, ``[B, H, Tq, Dv]``.
    q, k, v, mask, rng, scale, is_causal, dropout, stream
        As given to :func:`attention`.
    out, lse : relax.Expr
        The two results of :func:`attention`.

    Returns
    -------
    relax.Call
        Of type ``Tuple(dq, dk, dv)``; the mask gets no gradient here.
    """
    args = [grad_out, q, k, v, out, lse, *_there(mask, rng)]
    attrs = attributes(scale, is_causal, dropout, stream)
    return registry.call("relax_disc.attention_backward", args, attrs)


def attention_backward_trained(
    grad_out: relax.Expr,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    out: relax.Expr,
    lse: relax.Expr,
    mask: relax.Expr,
    rng: relax.Expr | None = None,
    *,
    scale: float,
    is_causal: bool,
    dropout: float = 0.0,
    stream: int = 0,
) -> relax.Call:
    """Build ``relax_disc.attention_backward_trained``: the gradients of q, k, v and of the mask.

    The mask, as a trained bias by position, is ``[B, H, Tq, Tk]`` of the type of q; all else is as
    given to :func:`attention_backward`.  Of type ``Tuple(dq, dk, dv, dmask)``.
    """
    args = [grad_out, q, k, v, out, lse, *_there(mask, rng)]
    attrs = attributes(scale, is_causal, dropout, stream)
    return registry.call("relax_disc.attention_backward_trained", args, attrs)


def _infer_attention(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    q, k, v = (
        registry.tensor_type(arg, f"relax_disc.attention: {name}", 4)
        for name, arg in zip("qkv", call.args[:3], strict=True)
    )
    masks, states = optional_operands(call, 3)
    for mask in masks:
        registry.tensor_type(mask, "relax_disc.attention: mask", 4)
    for state in states:
        registry.tensor_type(state, "relax_disc.attention: seed and offset", 1)
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


def _infer_attention_backward_trained(
    call: relax.Call, builder: relax.BlockBuilder
) -> relax.TupleType:
    gradients = list(_infer_attention_backward(call, builder).fields)
    (mask,), _ = optional_operands(call, 6)
    name = "relax_disc.attention_backward_trained: mask"
    return relax.TupleType([*gradients, registry.tensor_type(mask, name, 4)])


registry.register("relax_disc.attention", _infer_attention, "Scaled dot-product attention.")
registry.register(
    "relax_disc.attention_backward",
    _infer_attention_backward,
    "Gradients of scaled dot-product attention.",
)
registry.register(
    "relax_disc.attention_backward_trained",
    _infer_attention_backward_trained,
    "Gradients of scaled dot-product attention, that of its mask among them.",
)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=registry.torch_statistics_dtype(q))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


registry.traced(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor? mask, Tensor? rng, float scale, bool is_causal, float dropout, int stream)"
    " -> (Tensor, Tensor, Tensor)",
    lambda grad_out, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:3]),
    attention_backward,
    ("scale", "is_causal", "dropout", "stream"),
)
registry.traced(
    "attention_backward_trained(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out,"
    " Tensor lse, Tensor mask, Tensor? rng, float scale, bool is_causal, float dropout, int stream)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda grad_out, q, k, v, out, lse, mask, *_: tuple(
        x.new_empty(x.shape) for x in (q, k, v, mask)
    ),
    attention_backward_trained,
    ("scale", "is_causal", "dropout", "stream"),
)


@registry.kept(torch.ops.aten.scaled_dot_product_attention.default)
def keep_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Keep ``scaled_dot_product_attention`` without dropout; `Randomness` has the others."""
    if dropout_p != 0.0:
        return None
    return whole_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    draws: tuple[Tensor | None, float, int] = (None, 0.0, 0),
) -> Tensor | None:
    """Trace attention over rank 4 whole; None: of another rank.

    ``draws``: state, probability and stream of dropout.
    """
    if not query.dim() == key.dim() == value.dim() == 4:
        return None
    # One head of keys for all, as in multi-query attention, is spread like any axis of one.
    is_grouped = enable_gqa or key.shape[1] == value.shape[1] == 1
    if query.shape[0] != key.shape[0] or (query.shape[1] != key.shape[1] and not is_grouped):
        return None
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if attn_mask.requires_grad:  # its gradient is that of all scores, each by itself
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    rng, dropout, stream = draws
    return torch.ops.relax_disc.attention(
        *(query, key, value, attn_mask, rng, factor, is_causal, dropout, stream)
    )[0]


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, ctx.scale, ctx.is_causal, ctx.dropout, ctx.stream = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _attention_gradient(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> Any:
    q, k, v, mask, rng, out, lse = ctx.saved_tensors
    is_trained = ctx.needs_input_grad[3]
    backward = (
        torch.ops.relax_disc.attention_backward_trained
        if is_trained
        else torch.ops.relax_disc.attention_backward
    )
    grads = backward(
        *(grad_out, q, k, v, out, lse, mask, rng),
        *(ctx.scale, ctx.is_causal, ctx.dropout, ctx.stream),
    )
    return (*grads, *(None,) * (9 - len(grads)))


registry.traced(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? rng, float scale,"
    " bool is_causal, float dropout, int stream) -> (Tensor, Tensor)",
    _fake_attention,
    attention,
    ("scale", "is_causal", "dropout", "stream"),
    gradient=(_attention_gradient, _save_attention),
)


from relax_disc.ops.attention import library, packed, plain  # noqa: E402, F401  what computes them
