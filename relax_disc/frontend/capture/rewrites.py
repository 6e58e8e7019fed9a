"""Operators of an exported graph that are written in smaller ones, whose gradients are known.

As in :mod:`.whole_operators`, each rule takes the operator's own arguments.  They stand in for
forms that PyTorch cannot trace with symbolic sizes, or whose gradients are operators of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import grid_sampler_2d

from relax_disc import ops  # noqa: F401  registers torch.ops.relax_disc
from relax_disc.errors import UnsupportedOperatorError

Rule = Callable[..., Any]


def cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Write the similarity in smaller operators; PyTorch's own form needs numbers as sizes."""
    norms = [torch.linalg.vector_norm(t, dim=dim, keepdim=True).clamp_min(eps) for t in (x, y)]
    return ((x / norms[0]) * (y / norms[1])).sum(dim)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Write weight normalisation in smaller operators, whose gradients are known."""
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    return v * (g / torch.linalg.vector_norm(v, dim=axes, keepdim=True))


def weight_norm_interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """``aten._weight_norm_interface``: the weight, and the norms that only its gradient reads."""
    return weight_norm(v, g, dim), torch.zeros_like(g)


def adaptive_average(x: Tensor, output_size: Sequence[int]) -> Tensor | None:
    """Average over whole planes; PyTorch's own form plays with strides, as if memory were known."""
    if any(not isinstance(size, int) or size != 1 for size in output_size):
        return None
    return x.mean(tuple(range(-len(output_size), 0)), keepdim=True)


def cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """Norms of all differences, never by a matrix product: exact for near points."""
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x, y = (t.expand(*batch, *t.shape[-2:]).contiguous() for t in (x, y))
    return torch.ops.aten._cdist_forward(x, y, float(p), 2)


def dist(x: Tensor, y: Tensor, p: float = 2.0) -> Tensor:
    """Norm of a difference."""
    return torch.linalg.vector_norm(x - y, p)


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Fill the places of a mask from a tensor, in order: each counts the places before it."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    x, mask = x.expand(shape), mask.expand(shape)
    order = mask.flatten().to(torch.int64).cumsum(0).sub(1).clamp_min(0)
    taken = source.flatten().index_select(0, order).view(shape)
    return torch.where(mask, taken, x)


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th least element and its position."""
    values, places = torch.sort(x, dim)
    values, places = (t.narrow(dim, k - 1, 1) for t in (values, places))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def median_of(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The median along an axis, the lower of two; NaN is not looked for."""
    return kthvalue(x, (x.shape[dim] - 1) // 2 + 1, dim, keepdim)


def median(x: Tensor) -> Tensor:
    """The median of all elements."""
    return median_of(x.flatten(), 0)[0]


def trace(x: Tensor) -> Tensor:
    """Sum of a diagonal."""
    return x.diagonal().sum()


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """Length of a hypotenuse, scaled so that squares neither overflow nor vanish."""
    top = torch.maximum(x.abs(), y.abs()).detach()
    scale = torch.where(top == 0, 1.0, top)
    return torch.sqrt((x / scale) ** 2 + (y / scale) ** 2) * scale


def signbit(x: Tensor) -> Tensor:
    """Say whether a number is below zero; -0.0 counts."""
    below = x < 0
    return below | ((x == 0) & (1.0 / x < 0)) if x.is_floating_point() else below


def copysign(x: Tensor, sign: Tensor) -> Tensor:
    """The size of one number with the sign of another."""
    return torch.where(signbit(sign), -x.abs(), x.abs())


def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x^T W y`` for each output."""
    product = torch.einsum("oij,...j->...oi", weight, y)
    out = (product * x.unsqueeze(-2)).sum(-1)
    return out if bias is None else out + bias


def addbmm(
    x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Add the sum of a batch of matrix products."""
    return beta * x + alpha * torch.bmm(batch1, batch2).sum(0)


def addmv(
    x: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Add a product of a matrix and a vector."""
    return beta * x + alpha * torch.mv(matrix, vector)


def sgn(x: Tensor) -> Tensor:
    """Sign of a real number."""
    return torch.sign(x)


def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Tensor | None:
    """Repeat the border by reads at positions; other modes are PyTorch's own decompositions."""
    if mode != "replicate":
        return None
    for k in range(len(pad) // 2):
        before, after, axis = pad[2 * k], pad[2 * k + 1], x.dim() - 1 - k
        places = torch.arange(x.shape[axis] + before + after, device=x.device) - before
        x = x.index_select(axis, places.clamp(0, x.shape[axis] - 1))
    return x


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Cumulative product; PyTorch's gradient looks for zeros, ours is one pass."""
    return torch.ops.relax_disc.cumprod(x if dtype is None else x.to(dtype), dim % max(x.dim(), 1))


def prod(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor | None:
    """Product of all elements: the last cumulative one where a gradient is asked for."""
    if not x.requires_grad:
        return None
    flat = x.flatten()
    return cumprod(flat, 0, dtype=dtype).narrow(0, flat.shape[0] - 1, 1).sum()


def prod_along(
    x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Product along an axis: the last cumulative one where a gradient is asked for."""
    if not x.requires_grad:
        return None
    return cumprod(x, dim, dtype=dtype).narrow(dim, x.shape[dim] - 1, 1).sum(dim, keepdim)


def grid_sampler(
    x: Tensor, grid: Tensor, mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """Sample images at given places, by reads at positions and their weights."""
    if x.dim() != 4:
        raise UnsupportedOperatorError(
            f"grid_sample over {x.dim() - 2} spatial axes cannot be translated, only over 2.",
            (("aten.grid_sampler.default", ""),),
        )
    return grid_sampler_2d(x, grid, mode, padding_mode, align_corners)


def index_fill(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor | None:
    """Choose by a mask; PyTorch's gradient by the value asks for the distinct positions."""
    if x.dim() == 0:
        return None
    mask = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device).index_fill(0, index, True)
    shape = [-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())]
    return torch.where(mask.reshape(shape), value.to(x.dtype), x)


def as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor | None:
    """Read a contiguous tensor at positions, of which the gradient is a sum at positions."""
    if not x.is_contiguous() or x.storage_offset() != 0:
        return None
    first = storage_offset or 0
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= x.numel():  # what lies behind it in memory
        return None
    places: Any = first
    for axis, (n, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(n, device=x.device) * step
        places = places + along.reshape([-1 if k == axis else 1 for k in range(len(size))])
    if not len(size):
        return x.flatten()[first]
    return x.flatten().index_select(0, places.flatten()).reshape(size)


_ATEN = torch.ops.aten

REWRITES: dict[Any, Rule] = {
    _ATEN.as_strided.default: as_strided,
    _ATEN.index_fill.int_Tensor: index_fill,
    _ATEN.cosine_similarity.default: cosine_similarity,
    _ATEN.adaptive_avg_pool1d.default: adaptive_average,
    _ATEN.adaptive_avg_pool2d.default: adaptive_average,
    _ATEN.adaptive_avg_pool3d.default: adaptive_average,
    _ATEN._weight_norm.default: weight_norm,
    _ATEN._weight_norm_interface.default: weight_norm_interface,
    _ATEN.cdist.default: cdist,
    _ATEN.dist.default: dist,
    _ATEN.masked_scatter.default: masked_scatter,
    _ATEN.kthvalue.default: kthvalue,
    _ATEN.median.dim: median_of,
    _ATEN.median.default: median,
    _ATEN.trace.default: trace,
    _ATEN.hypot.default: hypot,
    _ATEN.signbit.default: signbit,
    _ATEN.copysign.Tensor: copysign,
    _ATEN.sgn.default: sgn,
    _ATEN.pad.default: pad,
    _ATEN.cumprod.default: cumprod,
    _ATEN.prod.default: prod,
    _ATEN.prod.dim_int: prod_along,
    _ATEN.bilinear.default: bilinear,
    _ATEN.addbmm.default: addbmm,
    _ATEN.addmv.default: addmv,
    _ATEN.grid_sampler.default: grid_sampler,
}
