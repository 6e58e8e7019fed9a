"""Tensors that PyTorch makes of an extent alone, which it takes as a number: made of ranges.

Evenly spaced numbers, windows, frequencies, triangles' positions, affine grids, one-hot rows.
Where no extent is a symbol all of these are PyTorch's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from relax_disc.frontend.capture.sizes.operands import as_operand


def _range(count: Any, options: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Make 0, 1, ... below a count, floats unless a type is given; ``options``: of a factory."""
    dtype = dtype or options.get("dtype") or torch.get_default_dtype()
    return torch.arange(count, dtype=dtype, device=options.get("device"))


def _is_symbol(number: Any) -> bool:
    return isinstance(number, torch.SymInt | torch.SymFloat)


def _arange(*bounds: Any, **options: Any) -> Tensor | None:
    """Floats from a number on, up to a dim: of whole ones, since PyTorch counts them by floats."""
    named = {"start": 0, "step": 1, **options}
    names = ("end",) if len(bounds) == 1 and "end" not in options else ("start", "end", "step")
    named |= dict(zip(names, bounds, strict=False))
    start, end, step = named["start"], named.get("end"), named["step"]
    plain = type(start) in (int, float) and type(step) in (int, float)
    if not isinstance(end, torch.SymInt) or not plain or options.get("out") is not None:
        return None
    if not (isinstance(start, float) or isinstance(step, float)) or step <= 0:
        return None
    dtype = options.get("dtype") or torch.get_default_dtype()
    if start == int(start) and step == int(step):
        count: Any = end
        places = torch.arange(int(start), count, int(step), device=options.get("device"))
        return places.to(dtype)
    if step != 1:
        return None
    whole = math.floor(start)
    return (_range(end - whole, options, torch.int64) + start).to(dtype)


def _linspace(start: Any, end: Any, steps: Any, **options: Any) -> Tensor | None:
    """Evenly spaced numbers, as many as a dim says, or between ends that are made of dims."""
    given = (start, end, steps)
    numbers = all(isinstance(x, int | float | torch.SymInt | torch.SymFloat) for x in given)
    if not numbers or not any(map(_is_symbol, given)) or options.get("out") is not None:
        return None
    count: Any = steps
    place = _range(count, options)
    step = (end - start) / torch.sym_max(steps - 1, 1)
    # From the nearer end, as PyTorch does, so that both ends are exact; one number is the start.
    backward: Any = count - 1 - place
    first = place.lt(torch.sym_max(steps // 2, 1))
    return torch.where(first, start + place * step, end - backward * step).to(place.dtype)


def _logspace(
    start: Any, end: Any, steps: Any, base: float = 10.0, **options: Any
) -> Tensor | None:
    """Powers of a base by evenly spaced numbers."""
    exponents = _linspace(start, end, steps, **options)
    return None if exponents is None else base**exponents


def _window(shape: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """Make a window; ``shape``: its values at angles from 0 to a whole turn."""

    def window(
        window_length: Any, periodic: bool = True, *parameters: float, **options: Any
    ) -> Tensor | None:
        """Compute its values from a range; one point is 1, whatever the window."""
        if not isinstance(window_length, torch.SymInt):
            return None
        named = {k: options.pop(k) for k in ("alpha", "beta") if k in options}
        length: Any = window_length if periodic else window_length - 1
        angle = _range(window_length, options) * (2 * math.pi / torch.sym_max(length, 1))
        has_others = as_operand(window_length).to(angle.device) > 1
        return torch.where(has_others, shape(angle, *parameters, **named), 1.0)

    return window


def _hamming(angle: Tensor, alpha: float = 0.54, beta: float = 0.46) -> Tensor:
    return alpha - beta * torch.cos(angle)


def _blackman(angle: Tensor) -> Tensor:
    return 0.42 - 0.5 * torch.cos(angle) + 0.08 * torch.cos(2 * angle)


def _bartlett(angle: Tensor) -> Tensor:
    return 1 - (angle / math.pi - 1).abs()


def _fftfreq(n: Any, d: float = 1.0, **options: Any) -> Tensor | None:
    """Frequencies of a transform: the positive ones, then the negative ones."""
    if not isinstance(n, torch.SymInt):
        return None
    count: Any = n
    place = _range(count, options)
    return torch.where(place < (count + 1) // 2, place, place - count) / (count * d)


def _rfftfreq(n: Any, d: float = 1.0, **options: Any) -> Tensor | None:
    """Frequencies of a transform of real numbers."""
    count: Any = n
    return _range(count // 2 + 1, options) / (count * d) if isinstance(n, torch.SymInt) else None


def _triangle(is_upper: bool) -> Callable[..., Tensor | None]:
    def indices(row: Any, col: Any, offset: int = 0, **options: Any) -> Tensor | None:
        """List rows and columns of a triangle of a square, with or without its diagonal."""
        least = {0: 0, 1 if is_upper else -1: 1}.get(offset)
        is_square = isinstance(row, torch.SymInt) and statically_known_true(row == col)
        if not is_square or least is None:
            return None
        side: Any = row
        count = side * (side + 1 - 2 * least) // 2
        places, rows = (_range(n, options, torch.int64) for n in (count, side))
        # Of the lower triangle, where each row starts; the upper one is that, turned round.
        starts = rows * (rows + 1 - 2 * least) // 2
        at = count - 1 - places if is_upper else places
        of_lower = torch.searchsorted(starts, at, right=True) - 1
        column = at - starts[of_lower]
        found = (side - 1 - of_lower, side - 1 - column) if is_upper else (of_lower, column)
        return torch.stack(found).to(options.get("dtype") or torch.int64)

    return indices


def _affine_grid(
    theta: Tensor, size: Sequence[Any], align_corners: bool | None = None
) -> Tensor | None:
    """PyTorch's grid of points and ones, times the matrix of each sample.

    ``theta``: [N, 2, 3] or [N, 3, 4].  ``size``: of the pictures, [N, C, H, W] or [N, C, D, H, W].
    """
    if all(isinstance(extent, int) for extent in size):
        return None
    extents = list(size[2:])
    axes = [_from_side_to_side(extent, bool(align_corners), theta) for extent in extents]
    one = torch.ones((), dtype=theta.dtype, device=theta.device)
    points = [*reversed(torch.meshgrid(*axes, indexing="ij")), one]
    grid = torch.stack([x.expand(extents) for x in points], dim=-1)
    rows = grid.reshape(1, -1, len(points)) @ theta.transpose(1, 2)
    return rows.reshape(size[0], *extents, len(extents))


def _from_side_to_side(length: Any, align_corners: bool, like: Tensor) -> Tensor:
    """Place points between -1 and 1, at the ends or half a step inside; a single one at 0."""
    place = _range(length, {"dtype": like.dtype, "device": like.device})
    steps = torch.sym_max(length - 1, 1) if align_corners else length
    return (2 * place - (length - 1)) / steps


def _one_hot(x: Tensor, num_classes: Any = -1) -> Tensor | None:
    """Write ones at the places that are named; another place is an index out of range."""
    if not isinstance(num_classes, torch.SymInt):
        return None
    zeros = torch.zeros(*x.shape, num_classes, dtype=torch.int64, device=x.device)
    return zeros.scatter(-1, x.unsqueeze(-1), 1)


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.arange: _arange,
    torch.linspace: _linspace,
    torch.logspace: _logspace,
    torch.hann_window: _window(functools.partial(_hamming, alpha=0.5, beta=0.5)),
    torch.hamming_window: _window(_hamming),
    torch.blackman_window: _window(_blackman),
    torch.bartlett_window: _window(_bartlett),
    torch.fft.fftfreq: _fftfreq,
    torch.fft.rfftfreq: _rfftfreq,
    torch.tril_indices: _triangle(is_upper=False),
    torch.triu_indices: _triangle(is_upper=True),
    functional.affine_grid: _affine_grid,
    torch.affine_grid_generator: _affine_grid,
    functional.one_hot: _one_hot,
}
