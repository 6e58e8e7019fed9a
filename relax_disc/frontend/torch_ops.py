"""Torch operators that keep attention and cross-entropy whole while a step is traced.

The tracer sees one node for the forward and one for the gradient; the importer turns them into the
Relax operators of the same names (:mod:`relax_disc.ops`).  The bodies here are references in plain
PyTorch, so that a traced graph can also be run eagerly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AutogradContext = Any


def _statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the masked scores and the keys repeated for grouped heads."""
    kind = _statistics_dtype(q)
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).to(kind)
    scores = (q.to(kind) @ keys.transpose(-1, -2)) * scale
    if is_causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else None
        scores = scores + mask if hidden is None else scores.masked_fill(hidden, float("-inf"))
    return scores, keys


@torch.library.custom_op("relax_disc::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of ``[B, H, Tq, D]`` queries; see :func:`relax_disc.ops.attention`."""
    scores, _ = _scores(q, k, mask, scale, is_causal)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).to(scores.dtype)
    return (weights @ values).to(q.dtype), lse


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool) -> Any:
    out = q.new_empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=_statistics_dtype(q))


@torch.library.custom_op("relax_disc::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`attention` by q, k and v."""
    scores, keys = _scores(q, k, mask, scale, is_causal)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    repeats = q.shape[1] // k.shape[1]
    kind = scores.dtype
    grad, values = grad_out.to(kind), v.repeat_interleave(repeats, dim=1).to(kind)
    dots = (grad * out.to(kind)).sum(-1, keepdim=True)
    dscores = weights * (grad @ values.transpose(-1, -2) - dots) * scale
    dq = dscores @ keys
    dk = dscores.transpose(-1, -2) @ q.to(kind)
    dv = weights.transpose(-1, -2) @ grad
    grouped = (k.shape[0], k.shape[1], repeats)
    dk = dk.reshape(*grouped, *k.shape[2:]).sum(2)
    dv = dv.reshape(*grouped, *v.shape[2:]).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@attention_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_attention(ctx: AutogradContext, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, mask, ctx.scale, ctx.is_causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, mask, *output)


def _attention_gradient(ctx: AutogradContext, grad_out: Tensor, _grad_lse: Tensor) -> Any:
    q, k, v, mask, out, lse = ctx.saved_tensors
    grads = torch.ops.relax_disc.attention_backward(
        grad_out, q, k, v, out, lse, mask, ctx.scale, ctx.is_causal
    )
    return (*grads, None, None, None)


attention.register_autograd(_attention_gradient, setup_context=_save_attention)


@torch.library.custom_op("relax_disc::cross_entropy", mutates_args=())
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of ``[N, V]`` logits; see :func:`relax_disc.ops.cross_entropy`."""
    kind = _statistics_dtype(logits)
    wide = logits.to(kind)
    lse = torch.logsumexp(wide, -1)
    loss = torch.nn.functional.cross_entropy(
        wide,
        target,
        None if weight is None else weight.to(kind),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    counted = target != ignore_index
    rows = counted.to(kind)
    if weight is not None:
        rows = rows * weight.to(kind)[torch.where(counted, target, 0)]
    return loss.to(logits.dtype), lse, rows.sum()


@cross_entropy.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Any:
    kind = _statistics_dtype(logits)
    loss = logits.new_empty((logits.shape[0],) if reduction == "none" else ())
    return loss, logits.new_empty((logits.shape[0],), dtype=kind), logits.new_empty((), dtype=kind)


@torch.library.custom_op("relax_disc::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    count: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Tensor:
    """Gradient of :func:`cross_entropy` by the logits."""
    kind, classes = lse.dtype, logits.shape[1]
    counted = (target != ignore_index)[:, None]
    hot = torch.nn.functional.one_hot(torch.where(counted[:, 0], target, 0), classes).to(kind)
    factors = torch.ones(classes, dtype=kind) if weight is None else weight.to(kind)
    goal = (1 - label_smoothing) * hot * factors + label_smoothing / classes * factors
    probabilities = torch.exp(logits.to(kind) - lse[:, None])
    grad = probabilities * goal.sum(1, keepdim=True) - goal
    scale = grad_loss.to(kind) / count if reduction == "mean" else grad_loss.to(kind)
    scale = scale[:, None] if reduction == "none" else scale
    return torch.where(counted, grad * scale, 0.0).to(logits.dtype)


@cross_entropy_backward.register_fake
def _(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    count: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Any:
    return logits.new_empty(logits.shape)


def _save_cross_entropy(
    ctx: AutogradContext, inputs: tuple[Any, ...], output: tuple[Any, ...]
) -> None:
    logits, target, weight, *ctx.options = inputs
    _, lse, count = output
    ctx.mark_non_differentiable(lse, count)
    ctx.save_for_backward(logits, target, lse, count, weight)


def _cross_entropy_gradient(
    ctx: AutogradContext, grad_loss: Tensor, _grad_lse: Tensor, _grad_count: Tensor
) -> Any:
    logits, target, lse, count, weight = ctx.saved_tensors
    grad = torch.ops.relax_disc.cross_entropy_backward(
        grad_loss, logits, target, lse, count, weight, *ctx.options
    )
    return grad, None, None, None, None, None


cross_entropy.register_autograd(_cross_entropy_gradient, setup_context=_save_cross_entropy)


@torch.library.custom_op("relax_disc::logsumexp", mutates_args=())
def logsumexp(x: Tensor) -> Tensor:
    """Log of the sum of exponentials of ``[N, V]``; see :func:`relax_disc.ops.logsumexp`."""
    return torch.logsumexp(x.to(_statistics_dtype(x)), -1)


@logsumexp.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0],), dtype=_statistics_dtype(x))


@torch.library.custom_op("relax_disc::logsumexp_backward", mutates_args=())
def logsumexp_backward(grad: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    """Gradient of :func:`logsumexp` by its argument."""
    return (grad[:, None] * torch.exp(x.to(lse.dtype) - lse[:, None])).to(x.dtype)


@logsumexp_backward.register_fake
def _(grad: Tensor, x: Tensor, lse: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save_logsumexp(ctx: AutogradContext, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _logsumexp_gradient(ctx: AutogradContext, grad: Tensor) -> Tensor:
    return torch.ops.relax_disc.logsumexp_backward(grad, *ctx.saved_tensors)


logsumexp.register_autograd(_logsumexp_gradient, setup_context=_save_logsumexp)
