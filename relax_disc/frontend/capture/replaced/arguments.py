"""Arguments that PyTorch's own tracing takes otherwise than eager PyTorch does.

Masks of bytes, bounds that are a number and a tensor, factors that are made of sizes, and sums of
exponentials over rows that a mask has picked, for which PyTorch asks whether there is any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional

from relax_disc.frontend.capture.loops.sequences import is_same_shape
from relax_disc.frontend.capture.model_checks import assumed


def _where(condition: Tensor, *values: Any, **named: Any) -> Tensor | None:
    """``where`` by a mask of bytes."""
    if not isinstance(condition, Tensor) or condition.dtype != torch.uint8:
        return None
    return torch.where(condition.bool(), *values, **named)


def _where_of(x: Any, condition: Any, other: Any) -> Tensor | None:
    return _where(condition, x, other)


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor | None:
    """Bounds of which one is a number and one a tensor without axes, which stands for a number."""
    tensors = [bound for bound in (min, max) if isinstance(bound, Tensor)]
    if len(tensors) != 1 or min is None or max is None or tensors[0].dim():
        return None

    def bound(value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(x.device)
        return torch.full((), value, dtype=tensors[0].dtype, device=x.device)

    return x.clamp(bound(min), bound(max))


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor | None:
    """``logsumexp`` of rows that a mask has picked; PyTorch's own asks whether there is any."""
    if not any(free_unbacked_symbols(size) for size in x.shape):
        return None
    top = x.detach().amax(dim, keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)
    total = (x - top).exp().sum(dim, keepdim=True).log() + top
    return total if keepdim else total.sum(dim)  # over axes of size 1


def _index_add(add: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """Make what replaces a function that adds rows, in place or not."""

    def added(x: Tensor, dim: int, index: Tensor, source: Any, *, alpha: Any = 1) -> Tensor | None:
        """Add rows times a number that is made of sizes."""
        if not isinstance(alpha, torch.SymInt | torch.SymFloat):
            return None
        return add(x, dim, index, source * alpha)

    return added


def _equal(x: Tensor, other: Tensor) -> bool | None:
    """Whether two tensors of one shape are the same, as a condition of all their elements."""
    if x is other:
        return True
    if x.dim() != other.dim() or not is_same_shape(x.shape, other.shape):
        return None
    return _truth((x == other).all())


def _allclose(
    x: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Whether two tensors are nearly the same, as a condition of all their elements."""
    return _truth(torch.isclose(x, other, rtol, atol, equal_nan).all())


def _truth(x: Tensor) -> bool:
    known = assumed(x)
    return bool(x) if known is None else known


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    """Write nothing in place where nothing is dropped, as eager PyTorch does."""
    return input if inplace and (not training or p == 0) else None


REPLACED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((functional.dropout, functional.alpha_dropout), _dropout),
    torch.where: _where,
    Tensor.where: _where_of,
    torch.clamp: _clamp,
    Tensor.clamp: _clamp,
    torch.clip: _clamp,
    Tensor.clip: _clamp,
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.allclose: _allclose,
    Tensor.allclose: _allclose,
    **{each: _index_add(each) for each in (torch.index_add, Tensor.index_add, Tensor.index_add_)},
    torch.logsumexp: _logsumexp,
    Tensor.logsumexp: _logsumexp,
    torch.special.logsumexp: _logsumexp,
}
