"""Lists of tensors whose length is a dim, joined into one tensor without being cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from relax_disc.frontend.capture.loops.sequences import DynamicList


def _of_lists(join: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """Make what replaces a function; ``join`` takes the list in tensors ``[count, *shape]``."""

    @functools.wraps(join)
    def joined(tensors: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        parts = tensors.stacked() if isinstance(tensors, DynamicList) else None
        return None if parts is None else join(parts, *args, **kwargs)

    return joined


def _stack(parts: list[Tensor], dim: int = 0, axis: int | None = None) -> Tensor:
    """Join a list as long as a dim without cutting it."""
    axis = (dim if axis is None else axis) % parts[0].dim()
    return _behind_each_other([_along(part, axis) for part in parts], axis)


def _cat(parts: list[Tensor], dim: int = 0, axis: int | None = None) -> Tensor:
    """Join a list as long as a dim without cutting it."""
    axis = (dim if axis is None else axis) % (parts[0].dim() - 1)
    flat = [_along(part, axis).flatten(axis, axis + 1) for part in parts]
    return _behind_each_other(flat, axis)


def _vstack(parts: list[Tensor]) -> Tensor:
    """Elements of one axis are rows."""
    if parts[0].dim() > 2:
        return _cat(parts)
    return _behind_each_other([part.reshape(part.shape[0], -1) for part in parts], 0)


def _hstack(parts: list[Tensor]) -> Tensor:
    """Elements of one axis lie behind each other."""
    rank = parts[0].dim() - 1
    return _cat(parts, 1 if rank > 1 else 0) if rank else _stack(parts)


def _column_stack(parts: list[Tensor]) -> Tensor:
    """Elements of one axis are columns."""
    rank = parts[0].dim() - 1
    return _stack(parts, 1) if rank == 1 else _hstack(parts)


def _along(part: Tensor, axis: int) -> Tensor:
    return part.movedim(0, axis) if axis else part


def _behind_each_other(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _pad_sequence(
    sequences: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor | None:
    """Pad sequences of several dims to the longest, in the type of the first.

    PyTorch's own asks which is the longest.
    """
    lengths = [each.shape[0] for each in sequences] if isinstance(sequences, list | tuple) else []
    if not any(isinstance(length, torch.SymInt) for length in lengths):
        return None
    longest, rest = functools.reduce(torch.sym_max, lengths), sequences[0].dim() - 1
    padded = []
    for each, length in zip(sequences, lengths, strict=True):
        missing: Any = longest - length
        amounts = (0, missing) if padding_side == "right" else (missing, 0)
        each = each.to(sequences[0].dtype)
        padded.append(functional.pad(each, (*(0, 0) * rest, *amounts), value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.stack: _of_lists(_stack),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _of_lists(_cat)),
    **dict.fromkeys((torch.vstack, torch.row_stack), _of_lists(_vstack)),
    torch.hstack: _of_lists(_hstack),
    torch.column_stack: _of_lists(_column_stack),
    torch._C._nn.pad_sequence: _pad_sequence,  # pyright: ignore[reportAttributeAccessIssue]
}
