"""Tensors cut into a number of parts along an axis whose length is a symbol."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from relax_disc.frontend.capture.loops.bounds import ask_for_longer
from relax_disc.frontend.capture.loops.rows import pieces_of, rows_of
from relax_disc.frontend.capture.loops.sequences import DynamicList, fixed
from relax_disc.frontend.capture.sizes.branches import asked_for_model


def _cut(x: Tensor, dim: int, lengths: list[Any]) -> tuple[Tensor, ...]:
    ends = list(itertools.accumulate(lengths))
    return tuple(
        x.narrow(dim, end - length, length) for end, length in zip(ends, lengths, strict=True)
    )


def _tensor_split(
    x: Tensor, sections: Any = None, dim: int = 0, **_: Any
) -> tuple[Tensor, ...] | None:
    """Parts whose lengths differ by one at most, the longer ones first."""
    length = x.shape[dim]
    if not isinstance(length, torch.SymInt) or not isinstance(sections, int):
        return None
    if statically_known_true(length % sections == 0):
        return None
    lengths = [(length + sections - 1 - part) // sections for part in range(sections)]
    ask_for_longer(*lengths)
    return _cut(x, dim, lengths)


def _chunk(x: Tensor, chunks: Any, dim: int = 0) -> Any:
    """Parts of one length, and a last one of what is left; two but of a length of 1, which has one.

    How many there are of three or more depends on the length, unless it is a multiple.
    """
    length = x.shape[dim]
    if not isinstance(length, torch.SymInt):
        return None
    if not isinstance(chunks, int):
        return _split(x, 1, dim) if statically_known_true(length == chunks) else None
    if chunks < 2 or statically_known_true(length % chunks == 0):
        return None
    if chunks > 2:
        return pieces_of(x, dim, (length + chunks - 1) // chunks)
    if asked_for_model(length < 2):
        return None
    return _cut(x, dim, [(length + 1) // 2, length // 2])


def _unbind(x: Tensor, dim: int = 0) -> DynamicList | tuple[Tensor, ...] | None:
    """List what lies along an axis; as selections where it may be written, or sizes are counted.

    PyTorch allows writes into what it lists of tensors without a gradient, but asks for their sizes
    as numbers then.
    """
    count = x.shape[dim] if x.dim() else None
    is_symbolic = any(isinstance(size, torch.SymInt) for size in x.shape)
    may_be_written = is_symbolic and not x.requires_grad
    is_counted = any(map(free_unbacked_symbols, x.shape))
    if isinstance(count, int) and (may_be_written or is_counted):
        return tuple(x.select(dim, place) for place in range(count))
    return rows_of(x, dim)


def _split(x: Tensor, split_size_or_sections: Any, dim: int = 0) -> DynamicList | None:
    """List parts of one length; the last is shorter where that of the axis is no multiple."""
    size = split_size_or_sections
    if not isinstance(size, int) or size < 1 or x.dim() == 0:
        return None
    length = x.shape[dim]
    if fixed((length - 1) // size) is not None:
        return None  # as many parts at every length
    is_multiple = statically_known_true(length % size == 0)
    return rows_of(x, dim, size) if is_multiple else pieces_of(x, dim, size)


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.tensor_split: _tensor_split,
    Tensor.tensor_split: _tensor_split,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.unbind: _unbind,
    Tensor.unbind: _unbind,
    torch.split: _split,
    Tensor.split: _split,
}
