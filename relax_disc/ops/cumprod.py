"""A torch operator for cumulative products, whose gradient is right at zeros and takes one pass.

The gradient is ``E[k] * S[k]`` with ``E`` the product before k, ``S[k] = g[k] + x[k+1] S[k+1]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relax_disc.ops import registry

registry.traced(
    "cumprod_backward(Tensor grad, Tensor x, Tensor out, SymInt dim) -> Tensor",
    lambda grad, x, *_: x.new_empty(x.shape),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim = inputs[1]
    ctx.save_for_backward(inputs[0], output)


def _gradient(ctx: Any, grad: Tensor) -> Any:
    return torch.ops.relax_disc.cumprod_backward(grad, *ctx.saved_tensors, ctx.dim), None


registry.traced(
    "cumprod(Tensor x, SymInt dim) -> Tensor",
    lambda x, dim: x.new_empty(x.shape),
    gradient=(_gradient, _save),
)
