"""Attention whose scale is made of sizes, and over rows that a mask has picked.

PyTorch takes such a scale as a number, and asks whether there are such rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional

from relax_disc.frontend.capture.sizes.operands import as_operand


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """``scaled_dot_product_attention``; where there are such rows, as its documentation says."""
    is_counted = any(free_unbacked_symbols(n) for n in (*query.shape, *key.shape))
    is_scaled = isinstance(scale, torch.SymFloat)
    if is_scaled:
        query, scale = query * as_operand(scale).to(query.device), 1.0
    if not is_counted:
        options: Any = {"scale": scale, "enable_gqa": enable_gqa}
        given = query, key, value, attn_mask, dropout_p, is_causal
        return functional.scaled_dot_product_attention(*given, **options) if is_scaled else None
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(times, -3) for x in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        rows, columns = (torch.arange(n, device=query.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(rows[:, None] < columns, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = functional.softmax(scores, -1)
    return functional.dropout(weights, dropout_p) @ value


REPLACED: dict[Any, Callable[..., Any]] = {functional.scaled_dot_product_attention: _attention}
