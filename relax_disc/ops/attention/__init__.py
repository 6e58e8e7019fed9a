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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tvm import relax

from relax_disc.ops import registry
from relax_disc.ops.registry import Kind


def optional_operands(call: relax.Call, count: int) -> tuple[list[relax.Expr], list[relax.Expr]]:
    """Split what comes after the first ``count`` operands: a mask or none, a state or none."""
    rest = list(call.args[count:])
    drops = float(registry.attribute(call, "dropout")) > 0
    return (rest[:-1], rest[-1:]) if drops else (rest, [])


_OPTIONS = "float scale, bool is_causal, float dropout=0.0, SymInt stream=0"
_OPERANDS = "Tensor grad_out, Tensor q:4, Tensor k:4, Tensor v:4, Tensor out, Tensor lse"


def _results(q: Kind, k: Kind, v: Kind, *rest: Kind, **_: Any) -> tuple[Any, ...]:
    if len({kind.dtype for kind in (q, k, v)}) != 1:
        raise TypeError(f"relax_disc.attention: q, k and v differ in type: {q}, {k}, {v}.")
    if any(len(kind.shape) not in (4, 1) for kind in rest):
        raise TypeError(f"relax_disc.attention: a mask must have rank 4, a state 1, got {rest}.")
    return ((*q.shape[:3], v.shape[3]), q.dtype), (q.shape[:3], q.statistics)


attention_backward = registry.operator(
    f"attention_backward({_OPERANDS}, Tensor? mask, Tensor? rng, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
    """Gradients of scaled dot-product attention by q, k and v, in their shapes.

    ``grad_out`` is the gradient of the loss by ``out``, ``out`` and ``lse`` are the results of
    :func:`attention`, all else is as given to it.  The mask gets no gradient here.
    """,
    lambda grad_out, q, k, v, *_, **__: (q, k, v),
)
attention_backward_trained = registry.operator(
    f"attention_backward_trained({_OPERANDS}, Tensor mask:4, Tensor? rng, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    """Gradients of scaled dot-product attention, that of its mask among them, as the last.

    The mask, as a trained bias by position, is ``[B, H, Tq, Tk]`` of the type of q; all else is as
    given to :func:`attention_backward`.
    """,
    lambda grad_out, q, k, v, out, lse, mask, *_, **__: (q, k, v, mask),
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


def composed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
    dropped: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute attention by plain operators, as the documentation of PyTorch's writes it.

    ``dropped``: makes of the weights what dropout leaves of them.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-1, -2)) * factor
    if is_causal:
        shape = query.shape[-2], key.shape[-2]
        ones = torch.ones(shape, dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~ones.tril(), float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return dropped(torch.softmax(scores, -1)) @ value


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


attention = registry.operator(
    f"attention(Tensor q:4, Tensor k:4, Tensor v:4, Tensor? mask, Tensor? rng, {_OPTIONS})"
    " -> (Tensor, Tensor)",
    """Scaled dot-product attention.

    ``q`` is ``[B, H, Tq, D]``, ``k`` ``[B, Hk, Tk, D]`` with ``H`` divisible by ``Hk``, ``v``
    ``[B, Hk, Tk, Dv]``.  ``mask``, broadcastable to ``[B, H, Tq, Tk]`` and of rank 4, is bool (True
    takes part) or added to the scores, where the least number of float32 hides a key as ``-inf``
    does, but in a row of which all is hidden so: that takes the mean of ``v``, as in PyTorch's own
    arithmetic.  ``rng``, int64 ``[2]``, is seed and offset of the random operators; it is there if
    there is dropout.  ``scale``: factor of the scores.  ``is_causal``: row ``i`` sees columns
    ``j <= i`` (aligned to the top left, as PyTorch does).  ``dropout``: probability, in [0, 1),
    with which a weight is dropped; others grow by ``1 / (1 - p)``.  ``stream``: which operator of
    the model draws: numbers are those of a tensor ``[B, H, Tq, Tk]``.

    Of type ``Tuple(out [B, H, Tq, Dv], lse [B, H, Tq] float32)``; the ``lse`` of float64 inputs is
    float64.  A row that sees nothing has ``out = 0`` and ``lse = -inf``.
    """,
    _results,
    gradient=(_attention_gradient, _save_attention),
)


from relax_disc.ops.attention import library, packed, plain  # noqa: E402, F401  what computes them
