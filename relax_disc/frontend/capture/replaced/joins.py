"""Lists of tensors whose length is a dim, joined into one tensor without being cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relax_disc.frontend.capture.loops.sequences import DynamicList


def _parts(tensors: Any) -> list[Tensor] | None:
    """Return a list of symbolic length in tensors ``[count, *shape]``; None of other lists."""
    return tensors.stacked() if isinstance(tensors, DynamicList) else None


def _stack(tensors: Any, dim: int = 0) -> Tensor | None:
    """Join a list as long as a dim without cutting it."""
    parts = _parts(tensors)
    if parts is None:
        return None
    axis = dim % parts[0].dim()
    return _joined([_along(part, axis) for part in parts], axis)


def _cat(tensors: Any, dim: int = 0, axis: int | None = None) -> Tensor | None:
    """Join a list as long as a dim without cutting it."""
    parts = _parts(tensors)
    if parts is None:
        return None
    axis = (dim if axis is None else axis) % (parts[0].dim() - 1)
    return _joined([_along(part, axis).flatten(axis, axis + 1) for part in parts], axis)


def _vstack(tensors: Any) -> Tensor | None:
    """Elements of one axis are rows."""
    parts = _parts(tensors)
    if parts is None:
        return None
    rank = parts[0].dim() - 1
    return _cat(tensors) if rank > 1 else _joined([x.reshape(x.shape[0], -1) for x in parts], 0)


def _hstack(tensors: Any) -> Tensor | None:
    """Elements of one axis lie behind each other."""
    parts = _parts(tensors)
    if parts is None:
        return None
    rank = parts[0].dim() - 1
    return _cat(tensors, 1 if rank > 1 else 0) if rank else _joined(parts, 0)


def _along(part: Tensor, axis: int) -> Tensor:
    return part.movedim(0, axis) if axis else part


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    torch.vstack: _vstack,
    torch.row_stack: _vstack,
    torch.hstack: _hstack,
}
