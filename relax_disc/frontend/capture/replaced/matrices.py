"""Functions of matrices of which PyTorch's own forms make numbers of the sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _cov(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """PyTorch's formula without its look at the weights."""
    x = x if x.dim() == 2 else x.reshape(1, -1)
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    weights = [w for w in (fweights, aweights) if w is not None]
    if not weights:
        count: Any = x.shape[1]
        centred = x - x.mean(1, keepdim=True)
        return (centred @ centred.mH / torch.sym_max(count - correction, 0)).squeeze()
    w = math.prod(weights[1:], start=weights[0])
    total = w.sum()
    spent = correction if aweights is None else correction * (w * aweights).sum() / total
    centred = x - (x * w).sum(1, keepdim=True) / total
    return (centred * w @ centred.mH / (total - spent).clamp_min(0)).squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    """The covariance by the standard deviations."""
    cov = _cov(x)
    if cov.dim() == 0:
        return cov / cov
    deviation = cov.diagonal().real.sqrt() if cov.is_complex() else cov.diagonal().sqrt()
    found = cov / deviation[:, None] / deviation[None]
    if not found.is_complex():
        return found.clamp(-1, 1)
    return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))


def _fill_diagonal(x: Tensor, fill_value: Any, wrap: bool = False) -> Tensor | None:
    """Write a matrix's diagonal through its view; PyTorch's own form fixes the sizes."""
    if x.dim() != 2 or wrap:
        return None
    x.diagonal().fill_(fill_value)
    return x


def _diagonal(x: Tensor, offset: Any = 0, dim1: int = 0, dim2: int = 1) -> Tensor | None:
    """Cut off what lies on one side of the diagonal, where a size tells which one it is."""
    if not isinstance(offset, torch.SymInt):
        return None
    axis, cut = (dim2, offset) if offset >= 0 else (dim1, -offset)
    return x.narrow(axis, cut, x.shape[axis] - cut).diagonal(0, dim1, dim2)


def _diag(x: Tensor, diagonal: Any = 0) -> Tensor | None:
    """Take a matrix's diagonal; of a vector PyTorch's own form is left to do it."""
    found = _diagonal(x, diagonal) if x.dim() == 2 else None
    return None if found is None else found.clone()


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    """By differences whatever the number of rows, on which PyTorch's choice would depend."""
    return torch.cdist(x1, x2, p, "donot_use_mm_for_euclid_dist")


def _has_symbols(*tensors: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for each in tensors for size in each.shape)


def _kron(x: Tensor, y: Tensor) -> Tensor | None:
    """Each element of one times the whole of the other, by one product that broadcasts."""
    if not _has_symbols(x, y):
        return None
    rank = max(x.dim(), y.dim())
    left, right = ([1] * (rank - each.dim()) + list(each.shape) for each in (x, y))
    one = x.reshape([size for n in left for size in (n, 1)])
    other = y.reshape([size for n in right for size in (1, n)])
    return (one * other).reshape([n * m for n, m in zip(left, right, strict=True)])


def _block_diag(*tensors: Tensor) -> Tensor | None:
    """Matrices, or rows, along a diagonal, each with zeros on either side."""
    if not _has_symbols(*tensors):
        return None
    blocks = [each.reshape(1, -1) if each.dim() < 2 else each for each in tensors]
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in blocks))
    before, columns = 0, sum(each.shape[1] for each in blocks)
    rows = []
    for each in blocks:
        after = columns - before - each.shape[1]
        rows.append(functional.pad(each.to(dtype), (before, after)))
        before = before + each.shape[1]
    return torch.cat(rows)


REPLACED: dict[Any, Callable[..., Any]] = {
    Tensor.fill_diagonal_: _fill_diagonal,
    torch.cdist: _cdist,
    **dict.fromkeys((torch.diagonal, Tensor.diagonal), _diagonal),
    **dict.fromkeys((torch.diag, Tensor.diag), _diag),
    **dict.fromkeys((torch.cov, Tensor.cov), _cov),
    **dict.fromkeys((torch.corrcoef, Tensor.corrcoef), _corrcoef),
    **dict.fromkeys((torch.kron, Tensor.kron), _kron),
    torch.block_diag: _block_diag,
}
