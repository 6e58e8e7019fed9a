"""Pools of PyTorch's whose windows are as long as an axis, such as ``max_pool1d(x, x.size(2))``.

PyTorch takes windows as numbers, so that the length of the axis would become one.  A pool over the
whole of an axis is its maximum or its mean, whatever the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional


def _greatest(x: Tensor, dim: int) -> Tensor:
    """The first of equal ones takes the gradient, as in a pool."""
    return x.max(dim, keepdim=True).values


def _mean(x: Tensor, dim: int) -> Tensor:
    return x.mean(dim, keepdim=True)


def _each(value: Any, axes: int) -> list[Any]:
    """List a number for each axis of one for all, or of one for each."""
    found = list(value) if isinstance(value, Sequence) else [value]
    return found * axes if len(found) == 1 else found


def _reduced(
    x: Tensor,
    kernel: list[Any],
    stride: Any,
    is_plain: Sequence[bool],
    reduce: Callable[[Tensor, int], Tensor],
) -> tuple[Tensor, list[Any], list[Any], int]:
    """Reduce the axes that windows cover: tensor, windows and strides that are left, how many.

    ``kernel``: of the last axes.  ``is_plain``: whether an axis has neither border nor gaps.
    """
    axes = len(kernel)
    step = _each(stride, axes) if stride else list(kernel)
    whole = [
        axis
        for axis, (length, plain) in enumerate(zip(kernel, is_plain, strict=True))
        if isinstance(length, torch.SymInt)
        and plain
        and statically_known_true(length == x.shape[axis - axes])
    ]
    for axis in whole:
        x = reduce(x, axis - axes)
        kernel[axis] = step[axis] = 1
    return x, kernel, step, len(whole)


def _max_pool(axes: int, plain: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor | None:
        """Windows as long as an axis by its maximum; one axis as two, which keeps it a symbol."""
        if return_indices:
            return None
        kernel, border, spread = (_each(v, axes) for v in (kernel_size, padding, dilation))
        is_plain = [not b and s == 1 for b, s in zip(border, spread, strict=True)]
        left, kernel, step, whole = _reduced(x, kernel, stride, is_plain, _greatest)
        if whole == axes:
            return left
        if axes == 1:
            two = ([1, *kernel], [1, *step], [0, *border], [1, *spread])
            return functional.max_pool2d(x.unsqueeze(-2), *two, ceil_mode).squeeze(-2)
        return plain(left, kernel, step, border, spread, ceil_mode) if whole else None

    return pool


def _avg_pool(axes: int, plain: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor | None:
        """Windows as long as an axis by its mean; the rest is PyTorch's own."""
        if divisor_override is not None:
            return None
        kernel, border = _each(kernel_size, axes), _each(padding, axes)
        is_plain = [not b for b in border]
        left, kernel, step, whole = _reduced(x, kernel, stride, is_plain, _mean)
        if whole == axes:
            return left
        return plain(left, kernel, step, border, ceil_mode, count_include_pad) if whole else None

    return pool


REPLACED: dict[Any, Callable[..., Any]] = {
    function: made
    for kind, axes, *functions in (
        (_max_pool, 1, torch.max_pool1d, functional.max_pool1d),
        (_max_pool, 2, torch.max_pool2d, functional.max_pool2d),
        (_max_pool, 3, torch.max_pool3d, functional.max_pool3d),
        (_avg_pool, 1, torch.avg_pool1d),
        (_avg_pool, 2, functional.avg_pool2d),
        (_avg_pool, 3, functional.avg_pool3d),
    )
    for made in (kind(axes, functions[0]),)
    for function in functions
}
