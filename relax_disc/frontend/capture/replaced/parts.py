"""Tensors cut into a number of parts along an axis whose length is a symbol."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

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
    return _cut(x, dim, [(length + sections - 1 - part) // sections for part in range(sections)])


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...] | None:
    """Two parts, but of a length of 1, which has one.

    How many there are of three or more depends on the length, unless it is a multiple.
    """
    length = x.shape[dim]
    if not isinstance(length, torch.SymInt) or chunks != 2:
        return None
    if statically_known_true(length % 2 == 0):
        return None
    if asked_for_model(length < 2):
        return None
    return _cut(x, dim, [(length + 1) // 2, length // 2])


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.tensor_split: _tensor_split,
    Tensor.tensor_split: _tensor_split,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
}
