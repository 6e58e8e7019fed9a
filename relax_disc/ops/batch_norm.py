"""Batch normalisation in training, and its gradient, traced whole.

PyTorch's decompositions are some sixty operators for each layer, half of them reshapes; tracing
them took most of the trace of a convolution network.  The same arithmetic is written in Relax by
`relax_disc.frontend.converters.normalization`.

Limits: parameters, running statistics and input have one type; others are decomposed as before, and
so is batch normalisation in inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relax_disc.ops import registry


@registry.kept(torch.ops.aten.batch_norm.default)
def keep_batch_norm(x: Tensor, *rest: Any) -> Tensor | None:
    """Keep a batch norm that normalises by the batch's own statistics."""
    weight, bias, running_mean, running_var, training, *_ = rest
    tensors = [t for t in (x, weight, bias, running_mean, running_var) if t is not None]
    if not training or (running_mean is None) != (running_var is None) or not is_kept(tensors):
        return None
    out, mean, variance = batch_norm_and_statistics(x, *rest[:-1])
    if running_mean is not None and running_var is not None:
        running_mean.copy_(mean)
        running_var.copy_(variance)
    return out


def is_kept(tensors: Sequence[Tensor]) -> bool:
    """Whether a batch norm of these operands is traced whole."""
    return {t.dtype for t in tensors} in ({torch.float32}, {torch.float64})


def batch_norm_and_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise by the batch's statistics; also the new running mean and variance."""
    out, _, _, mean, variance = torch.ops.relax_disc.batch_norm(
        x, weight, bias, running_mean, running_var, momentum, eps
    )
    return out, mean.detach(), variance.detach()


def _fake(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), *(x.new_empty(x.shape[1:2]) for _ in range(4))


def _fake_backward(grad: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), *(x.new_empty(x.shape[1:2]) for _ in range(2))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, *_ = inputs
    _, mean, rstd, *_ = output
    ctx.save_for_backward(x, mean, rstd, *(() if weight is None else (weight,)))
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    x, mean, rstd, *weight = ctx.saved_tensors
    found = torch.ops.relax_disc.batch_norm_backward(grad, x, *(weight or (None,)), mean, rstd)
    needed = (g if asked else None for g, asked in zip(found, ctx.needs_input_grad, strict=False))
    return *needed, None, None, None, None


registry.traced(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var,"
    " float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
    gradient=(_gradient, _save),
)
registry.traced(
    "batch_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor rstd)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
