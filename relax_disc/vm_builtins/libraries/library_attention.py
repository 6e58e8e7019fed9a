"""Numpy twins of the native attention functions.

================================ ================================================================
`relax_disc.cpu.attention`       q, k, v, scale, is_causal, layout, out, lse
`..._masked`                     q, k, v, mask, scale, is_causal, layout, out, lse
`..._backward`                   grad_out, q, k, v, out, lse, scale, is_causal, layout, dq, dk, dv
`..._backward_masked`            grad_out, q, k, v, out, lse, mask, scale, ..., dv
================================ ================================================================

`layout` has one bit per tensor of rank 4, in the order of the arguments without mask and lse, the
first at the lowest bit: 0 if the tensor is stored [batch, heads, length, dim], 1 if it is stored
[batch, length, heads, dim]. `lse` is always [batch, heads, length]. The mask is bool (True takes
part) or added to the scores, [B|1, H|1, Tq|1, Tk|1]. A row that sees nothing has out = 0 and
lse = -inf.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_disc.vm_builtins.libraries.arrays import array_of, without_mask


def attention_masked(
    q: Any, k: Any, v: Any, mask: Any, scale: float, is_causal: int, layout: int, out: Any, lse: Any
) -> None:
    """Compute attention with a mask."""
    query, key, value, target = _views((q, k, v, out), layout)
    group = query.shape[1] // key.shape[1]
    scores = _scores(query, np.repeat(key, group, 1), mask, scale, is_causal)
    top = scores.max(-1, initial=-np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.nan_to_num(np.exp(scores - top[..., None]), nan=0.0)
        total = weights.sum(-1)
        array_of(lse)[...] = np.where(total > 0, top + np.log(total), -np.inf)
        sums = weights @ np.repeat(value, group, 1)
        target[...] = np.where(total[..., None] > 0, sums / total[..., None], 0)


def attention_backward_masked(
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    mask: Any,
    scale: float,
    is_causal: int,
    layout: int,
    dq: Any,
    dk: Any,
    dv: Any,
) -> None:
    """Compute the gradients of q, k and v of attention with a mask."""
    grad, query, key, value, result, *targets = _views((grad_out, q, k, v, out, dq, dk, dv), layout)
    group = query.shape[1] // key.shape[1]
    keys, values = np.repeat(key, group, 1), np.repeat(value, group, 1)
    scores = _scores(query, keys, mask, scale, is_causal)
    sums = array_of(lse)[..., None]
    with np.errstate(invalid="ignore"):
        weights = np.where(np.isneginf(sums), 0, np.exp(scores - sums)).astype(query.dtype)
    delta = (grad * result).sum(-1, keepdims=True)
    by_score = weights * (grad @ values.swapaxes(2, 3) - delta) * query.dtype.type(scale)
    targets[0][...] = by_score @ keys
    for target, full in (
        (targets[1], by_score.swapaxes(2, 3) @ query),
        (targets[2], weights.swapaxes(2, 3) @ grad),
    ):
        batch, heads, length, dim = target.shape
        target[...] = full.reshape(batch, heads, group, length, dim).sum(2)


attention = without_mask(attention_masked, 3)
attention_backward = without_mask(attention_backward_masked, 6)


def _views(tensors: tuple[Any, ...], layout: int) -> list[np.ndarray]:
    """View every tensor as [batch, heads, length, dim]."""
    arrays = [array_of(tensor) for tensor in tensors]
    return [
        array.transpose(0, 2, 1, 3) if layout >> i & 1 else array for i, array in enumerate(arrays)
    ]


def _scores(
    query: np.ndarray, keys: np.ndarray, mask: Any, scale: float, is_causal: int
) -> np.ndarray:
    """Masked scores [B, H, Tq, Tk]; what is hidden is -inf."""
    scores = query @ keys.swapaxes(2, 3) * query.dtype.type(scale)
    if mask is not None:
        extra = array_of(mask)
        scores = np.where(extra, scores, -np.inf) if extra.dtype == bool else scores + extra
    if is_causal:
        seen = np.tri(scores.shape[2], scores.shape[3], dtype=bool)
        scores = np.where(seen, scores, -np.inf)
    return scores
