"""Shapes at which one order is judged: corners of the declared ranges first, then inside.

Where a dim has no upper limit its largest sampled size is 64 times the least, at least 4096.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import isqrt

from relax_disc.analysis.symbolic.expr import SymbolicDim

_UNLIMITED_FACTOR = 64
_UNLIMITED_LEAST = 4096
_MOST_CORNERS = 8  # 2 ** 3: more dims than 3 are varied one at a time
_GRID_LEVELS = {1: 33, 2: 7, 3: 4}  # per dim, of the shapes that an order is checked at
_WALK_LENGTH = 64  # shapes to check beyond the corners where a grid would be too large


def sample_shapes(dims: Sequence[SymbolicDim]) -> tuple[dict[str, int], ...]:
    """Return the shapes to optimise for: the corners of the box and its geometric middle.

    With more than three dims: all least, all largest, and each dim alone at its other end.
    """
    ends = [_ends(dim) for dim in dims]
    if 2 ** len(dims) <= _MOST_CORNERS:
        points = list(product(*ends))
    else:
        low, high = [a for a, _ in ends], [b for _, b in ends]
        points = [tuple(low), tuple(high)]
        for index in range(len(dims)):
            points.append((*low[:index], high[index], *low[index + 1 :]))
            points.append((*high[:index], low[index], *high[index + 1 :]))
    points.append(tuple(_between(dim, 1, 2) for dim in dims))
    return _shapes(dims, points)


def check_shapes(dims: Sequence[SymbolicDim]) -> tuple[dict[str, int], ...]:
    """Return the shapes at which an order must be no worse than the given one.

    A grid, geometric in each dim, for up to three dims; else a fixed quasi-random walk.
    """
    levels = _GRID_LEVELS.get(len(dims))
    if levels is not None:
        axes = [[_between(dim, k, levels - 1) for k in range(levels)] for dim in dims]
        return _shapes(dims, list(product(*axes)))
    points = []
    for step in range(_WALK_LENGTH):
        # Each dim walks through 0 .. 64 with a stride of its own, coprime to 65.
        strides = [8 * index + 19 for index in range(len(dims))]
        points.append(
            tuple(
                _between(dim, (step * stride) % (_WALK_LENGTH + 1), _WALK_LENGTH)
                for dim, stride in zip(dims, strides, strict=True)
            )
        )
    return _shapes(dims, points)


def _ends(dim: SymbolicDim) -> tuple[int, int]:
    first, last = dim.first, dim.last
    if last is None:
        largest = max(_UNLIMITED_LEAST, _UNLIMITED_FACTOR * first)
        last = max(largest // dim.divisor * dim.divisor, first)
    if first == 0 and last > 0:
        first = dim.divisor  # an empty tensor says nothing about any order
    return first, last


def _between(dim: SymbolicDim, step: int, steps: int) -> int:
    """Return the size `step / steps` of the way between the ends, on a logarithmic scale."""
    first, last = _ends(dim)
    if step == 0 or first == last:
        return first
    if step == steps:
        return last
    ratio = (last / max(first, 1)) ** (step / steps) if steps != 2 else 0.0
    size = isqrt(max(first, 1) * last) if steps == 2 else int(max(first, 1) * ratio)
    return min(max(size // dim.divisor * dim.divisor, first), last)


def _shapes(
    dims: Sequence[SymbolicDim], points: Sequence[tuple[int, ...]]
) -> tuple[dict[str, int], ...]:
    """Return the points as shapes, each once, in their order."""
    names = [dim.name for dim in dims]
    return tuple(dict(zip(names, point, strict=True)) for point in dict.fromkeys(points))
