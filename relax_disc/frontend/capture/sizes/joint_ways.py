"""Branches of a model's own code on several dims, each of which may be the greater one.

``x if x.shape[1] >= longest else pad(x, longest)`` pads one of two batches to the length of the
other.  No program of the model is right for all sizes, but one is that pads both, by nothing where
there is nothing to pad.  So each condition is given the answer whose way is likely to be general,
even if the model takes these ways together at no sizes; and that program is compared with what the
model does at all sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from sympy.core.relational import Relational

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.sizes.dims import Sizes, sizes_of, spec_of, symbol_of
from relax_disc.frontend.capture.sizes.evaluation import MOST_POINTS, evaluate, example_among
from relax_disc.frontend.capture.sizes.ways import Ways
from relax_disc.frontend.capture.source_lines import SourceLine


@dataclass(frozen=True, slots=True)
class Region:
    """Sizes at which the conditions that a model asks are answered alike.

    ``points``: each a size of every dim, in the order of ``names``. ``where``: what holds there,
    over symbols named after the dims.
    """

    names: tuple[str, ...]
    points: np.ndarray
    where: tuple[Any, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """The sizes of each dim that occur."""
        return {name: np.unique(self.points[:, k]) for k, name in enumerate(self.names)}

    @property
    def equal(self) -> dict[str, str]:
        """Dims that are always as large as another, by which name."""
        found: dict[str, str] = {}
        for k, name in enumerate(self.names):
            same = (np.array_equal(self.points[:, i], self.points[:, k]) for i in range(k))
            first = next((i for i, is_same in enumerate(same) if is_same), None)
            if first is not None:
                found[name] = self.names[first]
        return found

    @property
    def example(self) -> dict[str, int]:
        """Sizes to export at, that differ and are no numbers to PyTorch, if there are such."""
        for least in (3, 2, 1):
            some = self.points[(self.points >= least).all(axis=1)]
            pairs = itertools.combinations(some.T, 2)
            apart = some[
                np.logical_and.reduce([one != other for one, other in pairs], initial=True)
            ]
            for points in (apart, some):
                if len(points):
                    return dict(zip(self.names, map(int, example_among(points)), strict=True))
        raise AssertionError("sizes are 1 or more")

    def split(self, condition: Any) -> list[Region]:
        """Split the sizes by a condition; itself alone where that has one answer.

        Raises `UnsupportedOperatorError`: it cannot be evaluated.
        """
        columns = zip(map(symbol_of, self.names), self.points.T, strict=True)
        truth = np.broadcast_to(evaluate(condition, dict(columns)), len(self.points))
        if truth.all() or not truth.any():
            return [self]
        return [
            Region(self.names, self.points[truth], (*self.where, condition)),
            Region(self.names, self.points[~truth], (*self.where, sympy.Not(condition))),
        ]


class JointWays(Ways):
    """Conditions on dims that a model's code asks, and what they are said to be.

    ``are_general``: whether those that differ within the ranges of their dims are given the likely
    answer, whatever the example's is. ``are_clamped``: whether, besides, differences of dims are 0
    where they would be less, as of ``pad(x, longest - length)`` behind ``if length < longest``.
    ``could_clamp``: whether there was such a difference.
    """

    def __init__(self, by_source: Mapping[str, Any]) -> None:
        super().__init__(by_source)
        self._conditions: dict[Any, None] = {}
        self._differing: dict[Any, bool] = {}  # whether conditions are answered in two ways
        self.are_general = self.are_clamped = self.could_clamp = False

    def begin(self) -> None:
        """Forget what was asked, before another export."""
        self._conditions.clear()

    def truth(self, condition: torch.SymBool, line: SourceLine) -> bool | None:
        """Note a condition; return the likely answer, if it is to be given."""
        named = self.named(condition)
        if named is None:
            return None
        self._conditions.setdefault(named)
        if not self.are_general or not self.differs(named):
            return None
        longest = {symbol_of(name): int(sizes[-1]) for name, sizes in self._sizes([named]).items()}
        return _likely(named, longest)

    def clamped(self, size: Any) -> Any:
        """Return a difference, or 0 where it is less at some sizes, if it is to be so."""
        if not self.are_general or not isinstance(size, torch.SymInt):
            return size
        below: Any = size < 0
        negative = self.named(below)
        if negative is None or len(negative.free_symbols) < 2:
            return size
        may_clamp = self.differs(negative)
        self.could_clamp = self.could_clamp or may_clamp
        return torch.sym_max(size, 0) if may_clamp and self.are_clamped else size

    def region(self, conditions: Sequence[Any] | None = None) -> Region:
        """Return all sizes of the dims of conditions: else of those that were asked.

        Raises `UnsupportedOperatorError`: there are too many.
        """
        sizes = self._sizes([*self._conditions] if conditions is None else conditions)
        if _are_too_many(sizes):
            raise UnsupportedOperatorError(f"There are too many sizes of {', '.join(sizes)}.")
        grids = np.meshgrid(*sizes.values(), indexing="ij")
        return Region(tuple(sizes), np.stack([grid.reshape(-1) for grid in grids], axis=-1))

    def _sizes(self, conditions: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return the sizes of each dim that conditions are of."""
        names = sorted({str(s) for each in conditions for s in each.free_symbols})
        return {name: sizes_of(spec_of(self.dims()[name])) for name in names}

    def differs(self, condition: Any) -> bool:
        """Whether a condition is answered in two ways, as far as that can be told."""
        if not condition.free_symbols:
            return False
        if condition not in self._differing:
            try:
                parts = self.region([condition]).split(condition)
            except UnsupportedOperatorError:
                parts = []
            self._differing[condition] = len(parts) > 1
        return self._differing[condition]

    def is_too_wide(self, condition: Any) -> bool:
        """Whether there are more sizes than can be looked at."""
        return _are_too_many(self._sizes([condition]))

    def split(self, region: Region) -> list[Region]:
        """Split sizes by what was asked.

        Raises `UnsupportedOperatorError`: it is of other dims, or cannot be evaluated.
        """
        parts = [region]
        for condition in self._conditions:
            if not condition.free_symbols <= set(map(symbol_of, region.names)):
                raise UnsupportedOperatorError(f"{condition} is of other dims.")
            parts = [part for each in parts for part in each.split(condition)]
        return parts


def _are_too_many(sizes: Mapping[str, np.ndarray]) -> bool:
    return math.prod(map(len, sizes.values())) > MOST_POINTS


def _has_number(difference: Any) -> bool:
    return difference.as_coeff_Add()[0] != 0


def _likely(condition: Any, longest: Mapping[sympy.Symbol, int]) -> bool:
    """Say how a condition is answered where sizes are long, and none equals another."""
    if isinstance(condition, sympy.Not):
        return not _likely(condition.args[0], longest)
    if isinstance(condition, sympy.And | sympy.Or):
        each = (_likely(arg, longest) for arg in condition.args)
        return all(each) if isinstance(condition, sympy.And) else any(each)
    if isinstance(condition, Relational) and _has_number(condition.lhs - condition.rhs):
        return (
            condition.xreplace({n: sympy.Integer(size) for n, size in longest.items()})
            == sympy.true
        )
    return isinstance(condition, sympy.Gt | sympy.Lt | sympy.Ne)
