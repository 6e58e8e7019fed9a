"""Signs of a polynomial over the declared ranges, cheapest proof first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from relax_disc.analysis.symbolic.comparison.bernstein import (
    EXACT_BELOW,
    INDEXED_SIZE,
    Layout,
    Monomial,
    bernstein_matrix,
    contract,
    layout,
    ray_matrix,
    top_powers,
)
from relax_disc.analysis.symbolic.comparison.quadratic import quadratic_signs
from relax_disc.analysis.symbolic.comparison.search import (
    BOTH,
    FARTHEST,
    LIMIT,
    NEGATIVE,
    NO_LIMIT,
    POSITIVE,
    ZERO,
    Side,
    Signs,
    exhaust,
    sample_grid,
    search,
    sign_of,
    value_at,
)
from relax_disc.analysis.symbolic.dim import SymbolicDim

COMMON_DEGREE = 3  # tried before the degrees of the single dims are counted
LARGEST_TENSOR = 2048
FIRST_LIMIT = 400  # boxes to try before all points of a small box are evaluated
FAR_STEPS = 4096  # how far to look on a side without limit, at first
MANY_TERMS = 32  # from here on all corners together cost less than one by one
LARGEST_BITS = 900  # of a term; floats end at 1024


def polynomial_signs(
    terms: Mapping[Monomial, int],
    symbols: Mapping[str, object],
    names: Sequence[str],
    limit: int = LIMIT,
) -> Signs:
    """Return the signs that a polynomial takes.

    Parameters
    ----------
    terms : mapping
        Coefficients by monomial, none of them 0, every factor a dim.
    symbols : mapping of str to SymbolicDim
        The dims.
    names : sequence of str
        The names of the dims that occur, sorted.
    limit : int
        Most boxes to bound.
    """
    signs = Signs()
    if not terms or (() in terms and len(terms) == 1):
        signs.add(sign_of(terms.get((), 0)), {})
        signs.possible = signs.found
        return signs
    sides = [_side(symbols[name]) for name in names]
    if _one_sign(terms, sides, signs) or _opposite_corners(terms, sides, signs):
        return signs
    if () not in terms:
        terms, names, sides = _without_common_factor(terms, names, sides)
        if len(terms) == 1 and _one_sign(terms, sides, signs):
            return signs
    if any(side.lower > FARTHEST or side.step > FARTHEST for side in sides):
        return signs
    form, positions = _form(terms, tuple(names))
    widest = max(side.upper or FARTHEST for side in sides).bit_length() * sum(form.degrees)
    largest = max(max(terms.values()), -min(terms.values())).bit_length()
    if form.size > LARGEST_TENSOR or largest + widest > LARGEST_BITS:
        return signs
    coefficients = np.zeros(form.size)
    coefficients[positions] = list(terms.values())
    _corner_signs(coefficients, form, sides, signs)
    if not signs.settled:
        sample_grid(terms, coefficients, form, sides, signs)
    if not signs.settled:
        quadratic_signs(terms, sides, signs)
    if not signs.settled:
        search(terms, coefficients, form, sides, signs, min(limit, FIRST_LIMIT))
    if signs.settled or limit <= FIRST_LIMIT:
        return signs
    if exhaust(terms, coefficients, form, sides, signs):
        return signs
    if signs.possible == NEGATIVE | ZERO | POSITIVE:
        search(terms, coefficients, form, sides, signs, limit)
    return signs


def _side(dim: object) -> Side:
    assert isinstance(dim, SymbolicDim)
    last = dim.last
    return Side(dim.name, dim.first, None if last is None or last > NO_LIMIT else last, dim.divisor)


def _one_sign(terms: Mapping[Monomial, int], sides: list[Side], signs: Signs) -> bool:
    """Settle the signs where all coefficients have one sign."""
    coefficients = terms.values()
    if min(coefficients) < 0 < max(coefficients):
        return False
    lowest = {side.name: side.lower for side in sides}
    # The value nearest to 0 is at the lowest corner, and the farthest at the highest.
    signs.add(sign_of(value_at(terms, lowest)), lowest)
    if signs.found == ZERO:
        highest = {
            side.name: side.lower + 1 if side.upper is None else side.upper for side in sides
        }
        signs.add(sign_of(value_at(terms, highest)), highest)
    signs.possible = signs.found
    return True


def _opposite_corners(terms: Mapping[Monomial, int], sides: list[Side], signs: Signs) -> bool:
    """Look for both signs where all dims are large, none is, and one is: most pairs end here."""
    if len(terms) > MANY_TERMS:
        return False
    lowest = {side.name: side.lower for side in sides}
    highest = {
        side.name: side.lower + FAR_STEPS * side.step if side.upper is None else side.upper
        for side in sides
    }
    signs.add(sign_of(value_at(terms, lowest)), lowest)
    signs.add(sign_of(value_at(terms, highest)), highest)
    for side in sides:
        if signs.found & BOTH == BOTH:
            return True
        point = {**lowest, side.name: highest[side.name]}
        signs.add(sign_of(value_at(terms, point)), point)
    return signs.found & BOTH == BOTH


def _without_common_factor(
    terms: Mapping[Monomial, int], names: Sequence[str], sides: list[Side]
) -> tuple[Mapping[Monomial, int], Sequence[str], list[Side]]:
    """Divide by dims that divide every monomial and are never 0: the sign stays."""
    monomials = list(terms)
    removable = [
        side.name
        for side in sides
        if side.lower > 0 and all(side.name in monomial for monomial in monomials)
    ]
    if not removable:
        return terms, names, sides
    remaining = [list(monomial) for monomial in monomials]
    for name in removable:
        for _ in range(min(monomial.count(name) for monomial in monomials)):
            for rest in remaining:
                rest.remove(name)
    reduced = dict(zip(map(tuple, remaining), terms.values(), strict=True))
    used = set(chain.from_iterable(reduced))
    kept = [side for side in sides if side.name in used]
    return reduced, tuple(side.name for side in kept), kept


def _form(terms: Mapping[Monomial, int], names: tuple[str, ...]) -> tuple[Layout, list[int]]:
    """Return a layout that holds all monomials, and where they stand in it."""
    total = max(map(len, terms))
    for degree in (total, COMMON_DEGREE):
        if (degree + 1) ** len(names) <= INDEXED_SIZE:
            form = layout(names, (degree,) * len(names))
            try:
                return form, [form.index[monomial] for monomial in terms]
            except KeyError:
                continue
    form = layout(names, tuple(max(m.count(name) for m in terms) for name in names))
    return form, [form.position(monomial) for monomial in terms]


def _corner_signs(coefficients: np.ndarray, form: Layout, sides: list[Side], signs: Signs) -> None:
    """Bound the whole box once and note the signs at its corners."""
    matrices = []
    tops = []
    for side, degree in zip(sides, form.degrees, strict=True):
        if side.upper is None:
            matrices.append(ray_matrix(side.lower, degree))
            tops.append(side.lower + 1)
        else:
            matrices.append(bernstein_matrix(side.lower, side.upper, degree))
            tops.append(side.upper)
    values = contract(coefficients, matrices)
    powers = top_powers(tuple(tops), form.degrees)
    magnitude = float(np.abs(coefficients) @ powers) * form.scale
    error = 0.0 if magnitude < EXACT_BELOW else magnitude * form.rounding
    corners = values[form.corners]
    for axis, side in enumerate(sides):
        if side.upper is None:
            bits = np.arange(len(corners)) >> (len(sides) - 1 - axis) & 1
            corners = np.where(bits == 1, corners[0], corners)
    for corner in (int(corners.argmin()), int(corners.argmax())):
        value = corners[corner]
        if error == 0 or abs(value) > error:
            last = len(sides) - 1
            point = {
                side.name: side.lower
                if side.upper is None or not corner >> (last - axis) & 1
                else side.upper
                for axis, side in enumerate(sides)
            }
            signs.add(sign_of(value), point)
    if signs.found & BOTH == BOTH:
        return
    least, most = values.min(), values.max()
    if error == 0:
        if least >= 0:
            signs.possible = (signs.found & ZERO) | (POSITIVE if most > 0 else 0)
        elif most <= 0:
            signs.possible = (signs.found & ZERO) | NEGATIVE
    elif least > error:
        signs.possible = POSITIVE
    elif most < -error:
        signs.possible = NEGATIVE
