"""Exact signs of polynomials of degree two that never change sign, as squares do.

Branch and bound cannot settle ``(x - y)**2 + 1`` over long ranges: the polynomial is small all
along a diagonal.  Written as a quadratic form in ``(1, x, y, ...)`` its matrix is positive
semidefinite, which elimination with exact fractions decides, and it is 0 only where the form's
kernel meets the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from relax_disc.analysis.symbolic.comparison.search import NEGATIVE, POSITIVE, ZERO, Side, Signs

Monomial = tuple[str, ...]
MOST_DIMS = 8


def quadratic_signs(terms: Mapping[Monomial, int], sides: Sequence[Side], signs: Signs) -> None:
    """Exclude signs of a polynomial of degree two, where its form is semidefinite."""
    if len(sides) > MOST_DIMS or max(map(len, terms)) != 2:
        return
    sign = -1 if signs.found & NEGATIVE else 1
    index = {side.name: position for position, side in enumerate(sides, start=1)}
    # Twice the matrix of the form, in integers; row 0 belongs to the constant.
    matrix = [[Fraction(0)] * (len(sides) + 1) for _ in range(len(sides) + 1)]
    for monomial, coefficient in terms.items():
        places = [0] * (2 - len(monomial)) + [index[name] for name in monomial]
        matrix[places[0]][places[1]] += sign * coefficient
        matrix[places[1]][places[0]] += sign * coefficient
    kernel = _kernel_if_semidefinite(matrix)
    if kernel is None:
        return
    one_sided = POSITIVE if sign > 0 else NEGATIVE
    signs.possible &= one_sided | ZERO
    if len(kernel) > 1:
        return
    for vector in kernel:
        if vector[0] == 0:
            continue
        sizes = [size / vector[0] for size in vector[1:]]
        point = {side.name: int(size) for side, size in zip(sides, sizes, strict=True)}
        if all(_allows(side, size) for side, size in zip(sides, sizes, strict=True)):
            signs.add(ZERO, point)
            return
    signs.possible &= one_sided


def _kernel_if_semidefinite(matrix: list[list[Fraction]]) -> list[list[Fraction]] | None:
    """Return a basis of the kernel of a positive semidefinite matrix, None for any other."""
    size = len(matrix)
    pivots: list[int] = []
    rest = [row[:] for row in matrix]
    remaining = list(range(size))
    while remaining:
        if any(rest[i][i] < 0 for i in remaining):
            return None
        pivot = next((i for i in remaining if rest[i][i] > 0), None)
        if pivot is None:
            # A zero on the diagonal of a semidefinite matrix has a row of zeros.
            if any(rest[i][j] for i in remaining for j in remaining):
                return None
            break
        remaining.remove(pivot)
        pivots.append(pivot)
        for i in remaining:
            factor = rest[i][pivot] / rest[pivot][pivot]
            if factor:
                for j in range(size):
                    rest[i][j] -= factor * rest[pivot][j]
    basis = []
    for free in remaining:
        vector = [Fraction(0)] * size
        vector[free] = Fraction(1)
        for pivot in reversed(pivots):
            total = sum(
                (rest[pivot][j] * vector[j] for j in range(size) if j != pivot), Fraction(0)
            )
            vector[pivot] = -total / rest[pivot][pivot]
        basis.append(vector)
    return basis


def _allows(side: Side, size: Fraction) -> bool:
    return (
        size.denominator == 1
        and size >= side.lower
        and (side.upper is None or size <= side.upper)
        and (int(size) - side.lower) % side.step == 0
    )
