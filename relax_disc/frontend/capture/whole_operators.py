"""Which operators of an exported graph are traced whole, and the conditions under which they are.

Each rule takes the operator's own arguments and returns its result built from
:mod:`relax_disc.frontend.torch_ops`, or ``None``: "not mine", the operator is then decomposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from relax_disc.frontend import torch_ops  # noqa: F401  registers torch.ops.relax_disc
from relax_disc.frontend.capture.rewrites import REWRITES

Rule = Callable[..., Any]

_REDUCTIONS = ("none", "mean", "sum")


def attention(
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
    """Keep ``scaled_dot_product_attention`` over rank 4 without dropout or a trained mask."""
    whole = query.dim() == key.dim() == value.dim() == 4 and dropout_p == 0.0
    if not whole or (attn_mask is not None and attn_mask.requires_grad):
        return None
    if query.shape[0] != key.shape[0] or (query.shape[1] != key.shape[1] and not enable_gqa):
        return None
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    return torch.ops.relax_disc.attention(query, key, value, attn_mask, factor, is_causal)[0]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Keep ``cross_entropy_loss`` with class indices; classes move to the last axis of two."""
    if target.is_floating_point() or logits.dim() < 2:
        return None
    classes, shape = logits.shape[1], target.shape
    if logits.dim() > 2:
        logits = logits.movedim(1, -1).reshape(-1, classes)
        target = target.reshape(-1)
    loss = torch.ops.relax_disc.cross_entropy(
        logits, target, weight, ignore_index, label_smoothing, _REDUCTIONS[reduction]
    )[0]
    return loss.reshape(shape) if reduction == 0 else loss


def logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor | None:
    """Keep ``logsumexp`` over the last axis, as rows of a matrix."""
    last = x.dim() - 1
    if last < 1 or [axis % x.dim() for axis in dim] != [last] or not x.is_floating_point():
        return None
    rows = torch.ops.relax_disc.logsumexp(x.reshape(-1, x.shape[-1])).to(x.dtype)
    shape = [*x.shape[:-1], 1] if keepdim else x.shape[:-1]
    return rows.reshape(shape)


def under_autocast(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Convert the operands as autocast would: its rules know ATen's operators, not ours.

    On the CPU it runs attention in its lower precision and cross-entropy in float32.
    """
    if not torch.is_autocast_enabled("cpu"):
        return args, kwargs
    chosen = {
        torch.ops.aten.scaled_dot_product_attention.default: torch.get_autocast_dtype("cpu"),
        torch.ops.aten.cross_entropy_loss.default: torch.float32,
    }
    if target not in chosen:
        return args, kwargs

    def convert(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(chosen[target]) if eligible else tensor

    return pytree.tree_map_only(Tensor, convert, (args, kwargs))


RULES: dict[Any, Rule] = {
    torch.ops.aten.scaled_dot_product_attention.default: attention,
    torch.ops.aten.cross_entropy_loss.default: cross_entropy,
    torch.ops.aten.logsumexp.default: logsumexp,
    **REWRITES,
}
