"""Polynomials over boxes of integers in Bernstein form: exact values at corners, bounds between.

On a box, a polynomial is a weighted mean of its *control values*, with weights that are never
negative, so their least and greatest enclose it; the control values at the corners are its values
there.  If all control values are >= 0, the polynomial is 0 at most on faces where a corner is 0.
On a side without upper limit the control values are the coefficients after shifting the dim to
its lower end, for which the same holds.

Control values are integers after scaling by the binomial coefficients.  They are computed in
float64: exactly where their magnitude stays below 2**52, otherwise with an a-priori bound of the
rounding error (`Enclosure.error`), so that a sign is claimed only where it is certain.

Reference: J. Garloff, "The Bernstein algorithm", Interval Computations 2, 1993.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import comb, lcm

import numpy as np

Monomial = tuple[str, ...]
EXACT_BELOW = 2.0**52
INDEXED_SIZE = 64  # layouts up to here know all their monomials from the start
_UNIT_ROUNDING = 2.0**-53


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where each monomial stands in the dense tensor of coefficients."""

    names: tuple[str, ...]
    degrees: tuple[int, ...]
    corners: np.ndarray
    size: int
    scale: float
    index: dict[Monomial, int] = field(default_factory=dict)

    def position(self, monomial: Monomial) -> int:
        """Return the flat index of a monomial."""
        position = self.index.get(monomial)
        if position is None:
            position = 0
            for name, degree in zip(self.names, self.degrees, strict=True):
                position = position * (degree + 1) + monomial.count(name)
            self.index[monomial] = position
        return position

    @property
    def rounding(self) -> float:
        """Relative error of a control value, as a multiple of the magnitude."""
        return _UNIT_ROUNDING * 8 * (sum(self.degrees) + 10 * len(self.degrees) + 10)


@lru_cache(maxsize=1024)
def layout(names: tuple[str, ...], degrees: tuple[int, ...]) -> Layout:
    """Return the layout of polynomials in `names` with at most these degrees."""
    size = 1
    scale = 1
    corners = [0]
    for degree in degrees:
        size *= degree + 1
        scale *= binomial_scale(degree)
        corners = [at * (degree + 1) + end for at, end in product(corners, (0, degree))]
    form = Layout(names, degrees, np.array(corners), size, float(scale))
    if size <= INDEXED_SIZE:
        for powers in product(*(range(degree + 1) for degree in degrees)):
            factors = zip(names, powers, strict=True)
            form.position(tuple(name for name, power in factors for _ in range(power)))
    return form


@lru_cache(maxsize=64)
def binomial_scale(degree: int) -> int:
    """Return the factor that makes the control values of one dim integers."""
    return lcm(*(comb(degree, k) for k in range(degree + 1)))


@lru_cache(maxsize=16384)
def bernstein_matrix(lower: int, upper: int, degree: int) -> np.ndarray:
    """Return the map from coefficients to scaled control values on ``lower .. upper``.

    Row i is the blossom of the monomials at (n - i) times the lower and i times the upper end.
    """
    scale = binomial_scale(degree)
    rows = [
        [
            sum(
                comb(i, j) * comb(degree - i, k - j) * upper**j * lower ** (k - j)
                for j in range(max(0, k - degree + i), min(i, k) + 1)
            )
            * (scale // comb(degree, k))
            for k in range(degree + 1)
        ]
        for i in range(degree + 1)
    ]
    return np.array(rows, dtype=np.float64)


@lru_cache(maxsize=4096)
def ray_matrix(lower: int, degree: int) -> np.ndarray:
    """Return the map from coefficients to those in powers of ``x - lower``."""
    rows = [
        [comb(k, j) * lower ** (k - j) if j <= k else 0 for k in range(degree + 1)]
        for j in range(degree + 1)
    ]
    return np.array(rows, dtype=np.float64)


@lru_cache(maxsize=4096)
def power_matrix(points: tuple[int, ...], degree: int) -> np.ndarray:
    """Return the map from coefficients to values at points."""
    return np.array([[point**k for k in range(degree + 1)] for point in points], dtype=np.float64)


@lru_cache(maxsize=4096)
def top_powers(tops: tuple[int, ...], degrees: tuple[int, ...]) -> np.ndarray:
    """Return the value of every monomial of a flat tensor at one point."""
    values = np.ones(1)
    for top, degree in zip(tops, degrees, strict=True):
        values = np.multiply.outer(values, float(top) ** np.arange(degree + 1)).reshape(-1)
    return values


def contract(coefficients: np.ndarray, matrices: Sequence[np.ndarray]) -> np.ndarray:
    """Apply one matrix per dim to a flat tensor; returns the flat result in the same order."""
    tensor = coefficients
    for matrix in matrices:
        tensor = (matrix @ tensor.reshape(matrix.shape[1], -1)).T
    return tensor.reshape(-1)


@lru_cache(maxsize=64)
def _blossom_weights(degree: int) -> np.ndarray:
    """Weights of ``upper**j * lower**m`` (rows, j-major) in the entries of `bernstein_matrix`."""
    count = degree + 1
    weights = np.zeros((count, count, count, count))
    for i, k in product(range(count), repeat=2):
        for j in range(max(0, k - degree + i), min(i, k) + 1):
            factor = binomial_scale(degree) // comb(degree, k)
            weights[j, k - j, i, k] = comb(i, j) * comb(degree - i, k - j) * factor
    return weights.reshape(count * count, count * count)


@lru_cache(maxsize=64)
def _shift_weights(degree: int) -> np.ndarray:
    """Weights of ``lower**m`` in the entries of `ray_matrix`."""
    count = degree + 1
    weights = np.zeros((count, count, count))
    for k in range(count):
        for j in range(k + 1):
            weights[k - j, j, k] = comb(k, j)
    return weights.reshape(count, count * count)


@dataclass(frozen=True, slots=True)
class Enclosure:
    """Control values of N boxes, ``values[N, size]``, each wrong by at most ``error[N]``."""

    values: np.ndarray
    error: np.ndarray


def enclose(
    coefficients: np.ndarray, form: Layout, lower: np.ndarray, upper: np.ndarray, ray: np.ndarray
) -> Enclosure:
    """Return the control values of one polynomial on many boxes.

    Parameters
    ----------
    coefficients : array
        Flat tensor of `form`.
    form : Layout
        Of the polynomial.
    lower, upper : int64 arrays [N, dims]
        Ends of the boxes, none negative.
    ray : bool array [N, dims]
        Sides without upper limit; their `upper` is not read.
    """
    count = len(lower)
    # The largest size that the entries of a row are powers of; a shift by l expands (l + 1)**k.
    top = np.where(ray, lower + 1, upper).astype(np.float64)
    values = np.broadcast_to(coefficients, (count, form.size))
    magnitude = np.broadcast_to(np.abs(coefficients), (count, form.size))
    some_ray = [bool(side.any()) for side in ray.T]
    for axis, degree in enumerate(form.degrees):
        exponents = np.arange(degree + 1)
        low_powers = lower[:, axis, None].astype(np.float64) ** exponents
        top_powers = top[:, axis, None] ** exponents
        mixed = (top_powers[:, :, None] * low_powers[:, None, :]).reshape(count, -1)
        matrices = mixed @ _blossom_weights(degree)
        if some_ray[axis]:
            shifted = low_powers @ _shift_weights(degree)
            matrices = np.where(ray[:, axis, None], shifted, matrices)
        matrices = matrices.reshape(count, degree + 1, degree + 1)
        tensor = values.reshape(count, degree + 1, -1)
        values = np.matmul(matrices, tensor).transpose(0, 2, 1).reshape(count, -1)
        folded = magnitude.reshape(count, degree + 1, -1)
        magnitude = np.matmul(top_powers[:, None, :], folded).reshape(count, -1)
    total = np.ravel(magnitude) * form.scale
    return Enclosure(values, np.where(total < EXACT_BELOW, 0.0, total * form.rounding))
