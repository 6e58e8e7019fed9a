"""Which signs a polynomial takes over a box of integers: branch and bound with certain bounds.

A box whose control values have one sign is settled; a box in which the polynomial is monotone along
a dim shrinks to the face that holds what is still looked for; any other box is cut in two whole
parts at integers, until every side has at most two integers and the corners tell all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

import numpy as np

from relax_disc.analysis.symbolic.comparison.bernstein import (
    EXACT_BELOW,
    Layout,
    Monomial,
    contract,
    enclose,
    power_matrix,
    top_powers,
)

NEGATIVE, ZERO, POSITIVE = 1, 2, 4
BOTH = NEGATIVE | POSITIVE

BATCH = 96  # boxes bounded at once: numpy's fixed costs are spread, few boxes are wasted
LIMIT = 1600  # boxes in all: about 10 ms on the machine of benchmarks/results/comparison.json
EXHAUSTIVE_POINTS = 300_000  # 3 ms
FEW = 12  # up to so many boxes are cut finely
FINE_CUTS = (6, 4, 2, 1)
DOUBTFUL_POINTS = 2000  # values too close to 0 for floats, evaluated one by one
FARTHEST = 2**40  # boxes without limit are not cut beyond; their cuts stay below NO_LIMIT
NO_LIMIT = 2**50  # an upper end beyond is treated as none, and no witness is looked for there


@dataclass(frozen=True, slots=True)
class Side:
    """One dim of a box: ``lower .. upper`` by ``step``; ``upper`` None is no limit."""

    name: str
    lower: int
    upper: int | None
    step: int


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


def value_at(terms: Mapping[Monomial, int], point: Mapping[str, int]) -> int:
    """Return the exact value of a polynomial."""
    total = 0
    for monomial, coefficient in terms.items():
        for name in monomial:
            coefficient *= point[name]
        total += coefficient
    return total


def sign_of(value: float) -> int:
    """Return the sign as a bit."""
    return POSITIVE if value > 0 else NEGATIVE if value < 0 else ZERO


def sample_grid(
    terms: Mapping[Monomial, int],
    coefficients: np.ndarray,
    form: Layout,
    sides: Sequence[Side],
    signs: Signs,
) -> None:
    """Look for signs on a coarse grid; every sign that is noted was checked exactly."""
    grids = [_samples(side) for side in sides]
    values = contract(coefficients, list(map(power_matrix, grids, form.degrees)))
    for position in (int(values.argmin()), int(values.argmax())):
        point = _grid_point(form.names, grids, position)
        signs.add(sign_of(value_at(terms, point)), point)


@lru_cache(maxsize=4096)
def _samples(side: Side) -> tuple[int, ...]:
    """Return up to 8 sizes: both ends, and steps that grow like powers in between."""
    if side.upper is None:
        steps = [0, 1, 3, 15, 127, 2**12, 2**20, 2**32]
    else:
        last = (side.upper - side.lower) // side.step
        steps = [0, 1, last // 32, last // 8, last // 4, last // 2, last * 3 // 4, last]
    sizes = {side.lower + step * side.step for step in steps}
    last = NO_LIMIT if side.upper is None else side.upper
    return tuple(sorted(size for size in sizes if size <= last))


def exhaust(
    terms: Mapping[Monomial, int],
    coefficients: np.ndarray,
    form: Layout,
    sides: Sequence[Side],
    signs: Signs,
) -> bool:
    """Evaluate every point of a small box; False where there are too many."""
    count = 1
    for side in sides:
        if side.upper is None:
            return False
        count *= (side.upper - side.lower) // side.step + 1
    if count > EXHAUSTIVE_POINTS:
        return False
    grids = [tuple(range(side.lower, (side.upper or 0) + 1, side.step)) for side in sides]
    values = contract(coefficients, list(map(power_matrix, grids, form.degrees)))
    powers = top_powers(tuple(grid[-1] for grid in grids), form.degrees)
    magnitude = float(np.abs(coefficients) @ powers)
    error = 0.0 if magnitude < EXACT_BELOW else magnitude * form.rounding
    doubtful = np.flatnonzero(np.abs(values) <= error)
    if error and len(doubtful) > DOUBTFUL_POINTS:
        return False
    for position in (values.argmin(), values.argmax(), *(doubtful if error else doubtful[:1])):
        point = _grid_point(form.names, grids, int(position))
        signs.add(sign_of(value_at(terms, point)), point)
    signs.possible = signs.found
    return True


def _grid_point(
    names: Sequence[str], grids: Sequence[tuple[int, ...]], position: int
) -> dict[str, int]:
    indices = np.unravel_index(position, tuple(len(grid) for grid in grids))
    return {name: grid[int(at)] for name, grid, at in zip(names, grids, indices, strict=True)}


def search(
    terms: Mapping[Monomial, int],
    coefficients: np.ndarray,
    form: Layout,
    sides: Sequence[Side],
    signs: Signs,
    limit: int = LIMIT,
) -> None:
    """Settle `signs` as far as `limit` boxes allow.

    Parameters
    ----------
    terms, coefficients, form
        The polynomial, exact and as floats.
    sides : sequence of Side
        The box, in the order of ``form.names``.
    signs : Signs
        What is known so far; completed in place.
    limit : int
        Most boxes to bound.
    """
    _Search(terms, coefficients, form, sides, signs).run(sides, limit)


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Rows of boxes: ends ``[N, dims]``, sides without limit, promise (least first), open signs."""

    lower: np.ndarray
    upper: np.ndarray
    ray: np.ndarray
    score: np.ndarray
    open: np.ndarray

    def take(self, rows: np.ndarray) -> _Boxes:
        return _Boxes(
            self.lower[rows], self.upper[rows], self.ray[rows], self.score[rows], self.open[rows]
        )

    @staticmethod
    def join(parts: Sequence[_Boxes]) -> _Boxes:
        return _Boxes(
            np.concatenate([part.lower for part in parts]),
            np.concatenate([part.upper for part in parts]),
            np.concatenate([part.ray for part in parts]),
            np.concatenate([part.score for part in parts]),
            np.concatenate([part.open for part in parts]),
        )


class _Search:
    """One branch and bound over one polynomial."""

    def __init__(
        self,
        terms: Mapping[Monomial, int],
        coefficients: np.ndarray,
        form: Layout,
        sides: Sequence[Side],
        signs: Signs,
    ) -> None:
        self.terms, self.coefficients, self.form, self.signs = terms, coefficients, form, signs
        self.step = np.array([side.step for side in sides], np.int64)
        self.given_up = 0  # open signs of boxes that cannot be cut any more

    def run(self, sides: Sequence[Side], limit: int) -> None:
        """Settle the signs, see `search`."""
        boxes = _Boxes(
            np.array([[side.lower for side in sides]], np.int64),
            np.array([[side.upper or 0 for side in sides]], np.int64),
            np.array([[side.upper is None for side in sides]]),
            np.zeros(1),
            np.array([NEGATIVE | ZERO | POSITIVE]),
        )
        while len(boxes.lower) and limit > 0 and self.signs.found & BOTH != BOTH:
            order = np.argsort(boxes.score, kind="stable")
            now = boxes.take(order[:BATCH])
            limit -= len(now.lower)
            boxes = _Boxes.join([boxes.take(order[BATCH:]), *self.bound(now)])
        left = int(np.bitwise_or.reduce(boxes.open, initial=0))
        self.signs.possible &= self.signs.found | left | self.given_up

    def bound(self, boxes: _Boxes) -> list[_Boxes]:
        """Bound boxes; returns what is left of those that may hold a sign not yet found."""
        lower, upper, ray = boxes.lower, boxes.upper, boxes.ray
        bound = enclose(self.coefficients, self.form, lower, upper, ray)
        values, error = bound.values, bound.error
        self.note_corners(boxes, values, error)
        least, most = values.min(axis=1), values.max(axis=1)
        negative = np.where(error == 0, least < 0, least <= error)
        positive = np.where(error == 0, most > 0, most >= -error)
        missing = ~self.signs.found
        wanted = np.zeros(len(lower), bool)
        wanted |= negative if missing & NEGATIVE else False
        wanted |= positive if missing & POSITIVE else False
        wanted |= negative & positive if missing & ZERO else False
        leaf = (~ray & (upper - lower <= self.step)).all(axis=1)
        for row in np.flatnonzero(wanted & leaf & (error > 0)):
            self.note_exactly(lower[row], upper[row])
        wanted &= ~leaf
        if not wanted.any():
            return []
        open_signs = np.where(negative, NEGATIVE, 0) | np.where(positive, POSITIVE, 0)
        open_signs |= np.where(negative & positive, ZERO, 0)
        score = np.full(len(lower), np.inf)
        score = np.minimum(score, least) if missing & NEGATIVE else score
        score = np.minimum(score, -most) if missing & POSITIVE else score
        rows = np.flatnonzero(wanted)
        kept = _Boxes(lower, upper, ray, score, open_signs).take(rows)
        return self.refine(kept, values[rows], error[rows])

    def note_corners(self, boxes: _Boxes, values: np.ndarray, error: np.ndarray) -> None:
        """Note the signs at the corners, where control values are values."""
        corners = np.broadcast_to(self.form.corners, (len(values), len(self.form.corners)))
        at = np.take_along_axis(values, corners, axis=1)
        if boxes.ray.any():
            # On a side without limit only the lower end is a corner.
            bits = np.arange(len(self.form.corners))
            count = boxes.ray.shape[1]
            for axis in range(count):
                high = (bits >> (count - 1 - axis)) & 1 == 1
                at = np.where(boxes.ray[:, axis, None] & high, np.nan, at)
        limit = error[:, None]
        for sign, hits in (
            (POSITIVE, at > limit),
            (NEGATIVE, at < -limit),
            (ZERO, (at == 0) & (limit == 0)),
        ):
            if not self.signs.found & sign and hits.any():
                row, corner = divmod(int(hits.argmax()), hits.shape[1])
                count = len(self.step)
                high = [(corner >> (count - 1 - axis)) & 1 for axis in range(count)]
                ends = np.where(high, boxes.upper[row], boxes.lower[row]).tolist()
                point = dict(zip(self.form.names, ends, strict=True))
                self.signs.add(sign_of(value_at(self.terms, point)), point)

    def note_exactly(self, lower: np.ndarray, upper: np.ndarray) -> None:
        """Evaluate the corners of one box without rounding."""
        for ends in product(*zip(lower.tolist(), upper.tolist(), strict=True)):
            point = dict(zip(self.form.names, ends, strict=True))
            self.signs.add(sign_of(value_at(self.terms, point)), point)

    def refine(self, boxes: _Boxes, values: np.ndarray, error: np.ndarray) -> list[_Boxes]:
        """Shrink monotone boxes to a face, cut the others in two."""
        count, dims = boxes.lower.shape
        weight = np.zeros((count, dims))
        lower, upper, ray = boxes.lower.copy(), boxes.upper.copy(), boxes.ray.copy()
        missing = ~self.signs.found & BOTH
        shrunk = np.zeros(count, bool)
        for axis in range(dims):
            change = self.changes(values, boxes, axis)
            weight[:, axis] = np.abs(change).max(axis=1, initial=0.0)
            if missing == BOTH:
                continue
            # Only minima matter while no negative value is known, and the other way round.
            if missing == POSITIVE:
                change = -change
            rising = (change.min(axis=1, initial=0.0) >= 0) & (error == 0)
            falling = (change.max(axis=1, initial=0.0) <= 0) & (error == 0) & ~ray[:, axis]
            open_side = ray[:, axis] | (upper[:, axis] > lower[:, axis])
            upper[:, axis] = np.where(rising, lower[:, axis], upper[:, axis])
            lower[:, axis] = np.where(falling & ~rising, upper[:, axis], lower[:, axis])
            ray[:, axis] &= ~rising
            shrunk |= (rising | falling) & open_side
        faces = np.flatnonzero(shrunk)
        whole = np.flatnonzero(~shrunk)
        shrunken = _Boxes(lower, upper, ray, boxes.score, boxes.open).take(faces)
        return [shrunken, *self.cut(boxes.take(whole), weight[whole])]

    def changes(self, values: np.ndarray, boxes: _Boxes, axis: int) -> np.ndarray:
        """Return control values of the derivative along one dim, up to positive factors."""
        shape = [degree + 1 for degree in self.form.degrees]
        before = int(np.prod(shape[:axis], dtype=int))
        tensor = values.reshape(len(values), before, shape[axis], -1)
        change = np.diff(tensor, axis=2)
        if boxes.ray[:, axis].any():
            # Coefficients of the powers of the distance, as they count at that distance.
            reach = (boxes.lower[:, axis, None] + 1.0) ** np.arange(1, shape[axis])
            powers = tensor[:, :, 1:] * reach[:, None, :, None]
            change = np.where(boxes.ray[:, axis, None, None, None], powers, change)
        return change.reshape(len(values), -1)

    def cut(self, boxes: _Boxes, weight: np.ndarray) -> list[_Boxes]:
        """Cut each box along the dim with the greatest weight that can be cut.

        While there are few boxes they are cut in many parts at once, which costs no more time.
        """
        done: list[_Boxes] = []
        for turn in range(len(self.step)):
            far = boxes.ray & (boxes.lower >= FARTHEST)
            weight = np.where(far | ~boxes.ray & (boxes.upper <= boxes.lower), -1.0, weight)
            stuck = weight.max(axis=1) < 0
            if stuck.any():
                rest = boxes.take(np.flatnonzero(stuck))
                if turn:  # slices of this call: not bounded yet
                    done.append(rest)
                else:
                    self.given_up |= int(np.bitwise_or.reduce(rest.open))
                boxes, weight = boxes.take(np.flatnonzero(~stuck)), weight[~stuck]
            if not len(weight):
                break
            few = len(weight) <= FEW
            axis = weight.argmax(axis=1)
            weight[np.arange(len(weight)), axis] = 0.0
            parts = self.slices(boxes, axis, FINE_CUTS if few else (1,))
            boxes = _Boxes.join([part.take(np.flatnonzero(full)) for part, full in parts])
            weight = np.concatenate([weight[full] for _, full in parts])
            if len(weight) > FEW:
                break
        return [*done, boxes]

    def slices(
        self, boxes: _Boxes, axis: np.ndarray, cuts: Sequence[int]
    ) -> list[tuple[_Boxes, np.ndarray]]:
        """Return slices of all boxes along one dim each, and which of them are not empty.

        A cut ``c`` is at ``1 / 2**c`` of a bounded side, nearer to the lower end the greater it is:
        there sizes of different degree meet.
        """
        rows = np.arange(len(axis))
        step = self.step[axis]
        low, high = boxes.lower[rows, axis], boxes.upper[rows, axis]
        ray = boxes.ray[rows, axis]
        result = []
        start = low
        for position in range(len(cuts) + 1):
            last = position == len(cuts)
            if last:
                end = high
            else:
                reach = np.where(
                    ray, (3 * low + 7 * step) << (2 * position), (high - low) >> cuts[position]
                )
                end = low + reach // step * step
            lower, upper, rays = boxes.lower.copy(), boxes.upper.copy(), boxes.ray.copy()
            lower[rows, axis] = start
            upper[rows, axis] = end
            rays[rows, axis] &= last
            full = (start <= end) | (ray & last)
            result.append((_Boxes(lower, upper, rays, boxes.score, boxes.open), full))
            start = end + step
        return result
