"""Operators of an exported graph that are written in smaller ones, whose gradients are known.

As in :mod:`.decompositions`, each rule takes the operator's own arguments.  They stand in for
forms that PyTorch cannot trace with symbolic sizes, or whose gradients are operators of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._decomp.decompositions import upsample_compute_output_size
from torch._subclasses.complex_tensor._core import Complex, ComplexTensor
from torch.utils import _pytree as pytree

from relax_disc import ops  # noqa: F401  registers torch.ops.relax_disc
from relax_disc.frontend.capture.sizes.exact import example_size

Rule = Callable[..., Any]


def cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Write the similarity in smaller operators; PyTorch's own form needs numbers as sizes."""
    rank = max(x.dim(), y.dim())
    x, y = (t.reshape((1,) * (rank - t.dim()) + tuple(t.shape)) for t in (x, y))
    if x.shape[dim] != y.shape[dim]:
        x, y = torch.broadcast_tensors(x, y)
    norms = [torch.linalg.vector_norm(t, dim=dim, keepdim=True) for t in (x, y)]
    # PyTorch raises norms below eps in place, and takes the gradient as if it had not.
    norms = [norm + (eps - norm).clamp_min(0).detach() for norm in norms]  # infinite ones too
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


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Fill the places of a mask from a tensor, in order: each counts the places before it."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    x, mask = x.expand(shape), mask.expand(shape)
    order = mask.flatten().to(torch.int64).cumsum(0).sub(1).clamp_min(0)
    taken = source.flatten().index_select(0, order).view(shape)
    return torch.where(mask, taken, x)


def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x^T W y`` for each output."""
    product = torch.einsum("oij,...j->...oi", weight, y)
    out = (product * x.unsqueeze(-2)).sum(-1)
    return out if bias is None else out + bias


def sgn(x: Tensor) -> Tensor:
    """Sign of a real number; the gradient of PyTorch's own fixes the size."""
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
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    return torch.ops.relax_disc.cumprod(x if dtype is None else x.to(dtype), dim % max(x.dim(), 1))


def prod(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor | None:
    """Product of all elements: the last cumulative one where a gradient is asked for."""
    if not x.requires_grad:
        return None
    flat = x.flatten()
    return _last_product(flat, 0, dtype).sum()


def prod_along(
    x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Product along an axis: the last cumulative one where a gradient is asked for."""
    if not x.requires_grad:
        return None
    return _last_product(x, dim, dtype).sum(dim, keepdim)


def _last_product(x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    count: Any = x.shape[dim]
    # A dim is 1 or more, but of t - 1 PyTorch takes that for granted as well.
    is_dim = isinstance(count, torch.SymInt) and count.node.expr.is_Symbol
    if not (is_dim or (isinstance(count, int) and count > 0)):  # the product of none is 1
        shape = [1 if axis == dim % x.dim() else n for axis, n in enumerate(x.shape)]
        ones = x.new_ones(shape)
        x = torch.cat([ones, x], dim)
    return cumprod(x, dim, dtype=dtype).narrow(dim, x.shape[dim] - 1, 1)


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
    """Read a tensor without gaps at positions, of which the gradient is a sum at positions.

    Its innermost axes that the view has, too, are read whole.
    """
    order = _order_of_dense(x)
    if order is None or x.storage_offset() != 0:
        return None
    first = storage_offset or 0
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= x.numel():  # what lies behind it in memory
        return None
    laid_out = x.permute(order)  # as memory has it
    whole: list[int] = []  # axes of the view, outermost first
    rest, unit = list(range(len(size))), 1
    for n in reversed(laid_out.shape):
        same = (k for k in rest if _same(size[k], n) and _same(stride[k], unit))
        axis = next(same, None)
        if axis is None or not all(
            _same(step // (unit * n) * (unit * n), step)
            for step in (first, *(stride[k] for k in rest if k != axis))
        ):
            break
        whole.insert(0, axis)
        rest.remove(axis)
        unit = unit * n
    places: Any = torch.full((), first // unit, dtype=torch.int64, device=x.device)
    for k, axis in enumerate(rest):
        along = torch.arange(size[axis], device=x.device) * (stride[axis] // unit)
        places = places + along.reshape([-1 if k == j else 1 for j in range(len(rest))])
    rows = laid_out.flatten(0, x.dim() - 1 - len(whole)) if len(whole) < x.dim() else laid_out[None]
    found = rows.index_select(0, places.flatten())
    axes = [*rest, *whole]
    found = found.reshape([size[axis] for axis in axes])
    return found.permute([axes.index(k) for k in range(len(size))])


def _order_of_dense(x: Tensor) -> list[int] | None:
    """Order the axes as memory has them; None where it has gaps or overlaps."""
    hints = [example_size(stride) for stride in x.stride()]
    if None in hints:
        return None
    order = sorted(range(x.dim()), key=lambda axis: (-(hints[axis] or 0), axis))
    unit: Any = 1
    for axis in reversed(order):
        if _same(x.shape[axis], 1):
            continue
        if not _same(x.stride(axis), unit):
            return None
        unit = unit * x.shape[axis]
    return order


def _same(one: Any, other: Any) -> bool:
    """Whether two sizes are the same expression: to ask PyTorch would be a guard."""
    each = [n.node.expr if isinstance(n, torch.SymInt) else n for n in (one, other)]
    return sympy.expand(each[0] - each[1]) == 0


def bilinear_upsampling(
    x: Tensor, size: Sequence[Any] | None, align_corners: bool, scales: Sequence[float] | None
) -> Tensor:
    """Resize planes by PyTorch's own kernel."""
    given = scales or (None, None)
    size = upsample_compute_output_size(x.shape, size, scales)
    return torch.ops.aten.upsample_bilinear2d.default(x, size, align_corners, *given)


def complex_parts(real: Tensor, imaginary: Tensor) -> Tensor:
    """Make a complex tensor of two real ones, on which PyTorch computes by its parts."""
    return Complex.apply(*torch.broadcast_tensors(real, imaginary))


class _Whole(torch.autograd.Function):
    """One complex tensor of a pair of parts."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return torch.complex(x.re, x.im)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,) = gradients
        return g if isinstance(g, ComplexTensor) else ComplexTensor(torch.real(g), torch.imag(g))


def alike_complex(arguments: Any) -> Any:
    """Part the complex tensors of a call of which another has parts: gradients become alike."""
    if not any(isinstance(leaf, ComplexTensor) for leaf in pytree.tree_leaves(arguments)):
        return arguments

    def parted(x: Tensor) -> Tensor:
        return ComplexTensor.from_interleaved(x) if is_whole_complex(x) else x

    return pytree.tree_map_only(Tensor, parted, arguments)


def is_whole_complex(x: Any) -> bool:
    """Say whether something is a complex tensor that is no pair of parts."""
    return isinstance(x, Tensor) and x.is_complex() and not isinstance(x, ComplexTensor)


def whole_complex(arguments: Any) -> Any:
    """Join the parts of complex tensors for operators that PyTorch has no rule by parts for."""
    return pytree.tree_map_only(ComplexTensor, _Whole.apply, arguments)


def polar(length: Tensor, angle: Tensor) -> Tensor:
    """Make a complex tensor of lengths and angles."""
    return complex_parts(length * torch.cos(angle), length * torch.sin(angle))


def view_as_complex(x: Tensor) -> Tensor:
    """Make a complex tensor of pairs."""
    return complex_parts(x.select(-1, 0), x.select(-1, 1))


def _of_contiguous(operator: Any) -> Rule:
    """Lay out a matrix first: PyTorch's gradient takes its factors as transposed or not by that."""
    return lambda x, *rest, **named: operator(x.contiguous(), *rest, **named)


_ATEN = torch.ops.aten

_DETERMINANTS = (
    *(_ATEN.det.default, _ATEN.linalg_det.default, _ATEN._linalg_det.default, _ATEN.logdet.default),
    *(_ATEN.slogdet.default, _ATEN.linalg_slogdet.default, _ATEN._linalg_slogdet.default),
)

REWRITES: dict[Any, Rule] = {
    **{operator: _of_contiguous(operator) for operator in _DETERMINANTS},
    _ATEN.complex.default: complex_parts,
    _ATEN.polar.default: polar,
    _ATEN.view_as_complex.default: view_as_complex,
    _ATEN.as_strided.default: as_strided,
    _ATEN.index_fill.int_Tensor: index_fill,
    _ATEN.cosine_similarity.default: cosine_similarity,
    _ATEN.adaptive_avg_pool1d.default: adaptive_average,
    _ATEN.adaptive_avg_pool2d.default: adaptive_average,
    _ATEN.adaptive_avg_pool3d.default: adaptive_average,
    _ATEN._weight_norm.default: weight_norm,
    _ATEN._weight_norm_interface.default: weight_norm_interface,
    _ATEN.cdist.default: cdist,
    _ATEN.masked_scatter.default: masked_scatter,
    _ATEN.sgn.default: sgn,
    _ATEN.pad.default: pad,
    _ATEN.cumprod.default: cumprod,
    _ATEN.prod.default: prod,
    _ATEN.prod.dim_int: prod_along,
    _ATEN.bilinear.default: bilinear,
    _ATEN.upsample_bilinear2d.vec: bilinear_upsampling,
}
