"""Kernels that take one position of each packed sequence, or put it back among zeros.

Each function returns what `te` computes from a tensor, `places` and `starts` of the packing (see
:mod:`.remove_padding`), the length unless the position is a number, and the positions where the
batch names them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te, tirx

from relax_disc.analysis.padding.moves import Move

Compute = Callable[..., te.Tensor]


def picked(axis: int, keeps_axis: bool) -> Compute:
    """Take a row of each sequence; ``axis``: of the rows; it stays as one of 1 or goes."""

    def compute(x: te.Tensor, row: te.Tensor, shape: Any) -> te.Tensor:
        def element(*i: Any) -> Any:
            return x(0, *i[1:axis], row(i[0]), *i[axis + keeps_axis :])

        return te.compute(shape, element, name="picked")

    return compute


def rows_of(move: Move, length: Any) -> Compute:
    """Find the packed row of the position that is picked of each sequence."""

    def compute(places: te.Tensor, starts: te.Tensor, *given: Any) -> te.Tensor:
        row = te.reduce_axis((0, places.shape[1]), "row")

        def element(sequence: Any) -> Any:
            is_it = tirx.all(
                places(1, row) == sequence,
                places(2, row) == _position(move, length, sequence, *given),
                row < starts(starts.shape[0] - 1),
            )
            zero = tirx.IntImm("int64", 0)
            return te.max(tirx.Select(is_it, row.var.astype("int64"), zero), row)

        return te.compute((starts.shape[0] - 1,), element, name="picked_rows")

    return compute


def spread(move: Move, length: Any, keeps_axis: bool) -> Compute:
    """Put a row of each sequence at its position, zero elsewhere."""
    axis = move.axis

    def compute(x: te.Tensor, places: te.Tensor, starts: te.Tensor, *given: Any) -> te.Tensor:
        def element(*i: Any) -> Any:
            row, sequence = i[axis], places(1, i[axis])
            position = _position(move, length, sequence, *given)
            is_there = tirx.all(places(2, row) == position, row < starts(starts.shape[0] - 1))
            between = [0] if keeps_axis else []
            value = x(sequence, *i[1:axis], *between, *i[axis + 1 :])
            return tirx.if_then_else(is_there, value, tirx.const(0, x.dtype))

        shape: list[Any] = [1, *x.shape[1:axis], places.shape[1], *x.shape[axis + keeps_axis :]]
        return te.compute(shape, element, name="spread")

    return compute


def _position(
    move: Move, outer: Any, sequence: Any, length: Any = None, positions: te.Tensor | None = None
) -> Any:
    """Position that is picked of a sequence; ``outer``: what the length is in `move`'s function."""
    if positions is None:
        return _sizes(move.start, getattr(outer, "name", ""), length)
    zeros = [0] * (len(positions.shape) - 1)
    position = positions(sequence, *zeros).astype("int64")
    return tirx.Select(position < 0, position + length, position)


def _sizes(value: Any, name: str, length: Any) -> Any:
    """Write a position that sizes say, where the length is so called."""
    if value == ("size", name):
        return length
    if not isinstance(value, tuple):
        return tirx.IntImm("int64", value)
    left, right = (_sizes(part, name, length) for part in value[1:])
    return left + right if value[0] == "add" else left - right
