"""Signs of a polynomial over the declared ranges, cheapest proof first.

Most pairs of sizes differ by a polynomial whose coefficients have one sign, or take both signs at
opposite corners of the box.  The rest is searched in C++ (`vm_builtins/src/symbolic/signs.cc`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import tvm_ffi

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import Monomial
from relax_disc.vm_builtins.runtime import function

NEGATIVE, ZERO, POSITIVE = 1, 2, 4
BOTH = NEGATIVE | POSITIVE

LIMIT = 6000  # boxes in all: some 10 ms
FAR_STEPS = 4096  # how far to look on a side without limit, at first
MANY_TERMS = 32  # from here on all corners together cost less than one by one
LARGEST_TENSOR = 2048  # coefficients of a polynomial written densely
FARTHEST = 2**40  # lower ends and steps beyond are not searched
NO_LIMIT = 2**50  # an upper end beyond is treated as none, and no witness is looked for there


@dataclass(slots=True)
class Signs:
    """Signs that were found, each with a point, and signs that are not excluded."""

    found: int = 0
    possible: int = NEGATIVE | ZERO | POSITIVE
    points: dict[int, dict[str, int]] = field(default_factory=dict)

    def add(self, sign: int, point: dict[str, int]) -> None:
        """Note that the polynomial has this sign at this point."""
        if not self.found & sign:
            self.found |= sign
            self.points[sign] = point

    @property
    def settled(self) -> bool:
        """Whether nothing is left to find out for an order."""
        return self.found & BOTH == BOTH or self.possible == self.found


def sign_of(value: int) -> int:
    """Return the sign as a bit."""
    return POSITIVE if value > 0 else NEGATIVE if value < 0 else ZERO


def polynomial_signs(
    terms: Mapping[Monomial, int],
    symbols: Mapping[str, object],
    names: Sequence[str],
    limit: int = LIMIT,
) -> Signs:
    """Return the signs that a polynomial takes.

    ``terms``: coefficients by monomial, none of them 0, every factor a dim. ``names``: the names of
    the dims that occur, sorted.
    """
    signs = Signs()
    if not terms or (() in terms and len(terms) == 1):
        signs.add(sign_of(terms.get((), 0)), {})
        signs.possible = signs.found
        return signs
    dims = [dim for name in names if isinstance(dim := symbols[name], SymbolicDim)]
    lowest = {dim.name: dim.first for dim in dims}
    highest = {dim.name: _far_end(dim) for dim in dims}
    if min(terms.values()) > 0 or max(terms.values()) < 0:
        # The value nearest to 0 is at the lowest corner, and the farthest at the highest.
        signs.add(sign_of(_value_at(terms, lowest)), lowest)
        if signs.found == ZERO:
            signs.add(sign_of(_value_at(terms, highest)), highest)
        signs.possible = signs.found
        return signs
    if not _opposite_corners(terms, lowest, highest, signs):
        _search(terms, dims, signs, limit)
    return signs


def _far_end(dim: SymbolicDim) -> int:
    return dim.first + FAR_STEPS * dim.divisor if dim.last is None else dim.last


def _value_at(terms: Mapping[Monomial, int], point: Mapping[str, int]) -> int:
    """Return the exact value of a polynomial."""
    total = 0
    for monomial, coefficient in terms.items():
        for name in monomial:
            coefficient *= point[name]
        total += coefficient
    return total


def _opposite_corners(
    terms: Mapping[Monomial, int], lowest: dict[str, int], highest: dict[str, int], signs: Signs
) -> bool:
    """Look for both signs where no dim is large, all are, and one is: most pairs end here."""
    if len(terms) > MANY_TERMS:
        return False
    single = ({**lowest, name: size} for name, size in highest.items())
    for point in (lowest, highest, *single):
        signs.add(sign_of(_value_at(terms, point)), point)
        if signs.found & BOTH == BOTH:
            return True
    return False


def _search(
    terms: Mapping[Monomial, int], dims: Sequence[SymbolicDim], signs: Signs, limit: int
) -> None:
    """Settle the signs by branch and bound, as far as the limit and 128 bits allow."""
    rows = [[monomial.count(dim.name) for dim in dims] for monomial in terms]
    # A dim that divides every monomial and is never 0 leaves the sign as it is.
    common = [
        0 if dim.first == 0 else min(column)
        for dim, column in zip(dims, zip(*rows, strict=True), strict=True)
    ]
    rows = [[power - least for power, least in zip(row, common, strict=True)] for row in rows]
    degrees = list(map(max, zip(*rows, strict=True)))
    used = [axis for axis, degree in enumerate(degrees) if degree]
    searchable = (
        prod(degrees[axis] + 1 for axis in used) <= LARGEST_TENSOR
        and all(dims[axis].first <= FARTHEST and dims[axis].divisor <= FARTHEST for axis in used)
        and max(map(abs, terms.values())) < 2**63
    )
    if not searchable:
        return
    sides: list[int] = []
    for axis in used:
        last = dims[axis].last
        end = -1 if last is None or last > NO_LIMIT else last
        sides += (dims[axis].first, end, dims[axis].divisor)
    found, possible, *points = function("relax_disc.polynomial_signs")(
        tvm_ffi.Shape(tuple(terms.values())),
        tvm_ffi.Shape(tuple(row[axis] for row in rows for axis in used)),
        tvm_ffi.Shape(tuple(sides)),
        limit,
    )
    rest = {dim.name: dim.first for dim in dims}
    values = iter(points)
    for sign in (NEGATIVE, ZERO, POSITIVE):
        if found & sign:
            signs.add(sign, rest | {dims[axis].name: next(values) for axis in used})
    signs.possible &= possible
