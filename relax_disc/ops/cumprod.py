"""A torch operator for cumulative products, whose gradient is right at zeros and takes one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AutogradContext = Any


@torch.library.custom_op("relax_disc::cumprod", mutates_args=())
def cumprod(x: Tensor, dim: int) -> Tensor:
    """Cumulative product along an axis."""
    return torch.cumprod(x, dim)


@cumprod.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("relax_disc::cumprod_backward", mutates_args=())
def cumprod_backward(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """Gradient ``E[k] * S[k]`` with ``E`` the product before k, ``S[k] = g[k] + x[k+1] S[k+1]``."""
    result = torch.empty_like(x)
    later: Any = 0.0
    for k in range(x.shape[dim] - 1, -1, -1):
        later = grad.select(dim, k) + later
        before = out.select(dim, k - 1) if k > 0 else 1.0
        result.select(dim, k).copy_(before * later)
        later = later * x.select(dim, k)
    return result


@cumprod_backward.register_fake
def _(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: AutogradContext, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim = inputs[1]
    ctx.save_for_backward(inputs[0], output)


def _gradient(ctx: AutogradContext, grad: Tensor) -> Any:
    return torch.ops.relax_disc.cumprod_backward(grad, *ctx.saved_tensors, ctx.dim), None


cumprod.register_autograd(_gradient, setup_context=_save)
