"""Attention whose scale is made of sizes, and over rows that a mask has picked.

PyTorch takes such a scale as a number, and asks whether there are such rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional

from relax_disc.frontend.capture.sizes.operands import as_operand
from relax_disc.ops.attention import composed_attention


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
    operands = query, key, value, attn_mask, is_causal, scale, enable_gqa
    return composed_attention(*operands, lambda weights: functional.dropout(weights, dropout_p))


REPLACED: dict[Any, Callable[..., Any]] = {functional.scaled_dot_product_attention: _attention}
