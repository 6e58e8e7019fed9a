"""The sizes that a plan is asked for: checked, and completed by those that follow from data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.errors import ShapeRangeError
from relax_disc.frontend.spec import CapturedStep
from relax_disc.training.call.counted_dims import CountedDims
from relax_disc.training.call.packing import rounded


class AskedSizes:
    """The sizes of one function: ``dims`` of its batches, packed rows and what it counts."""

    def __init__(
        self, captured: CapturedStep, dims: Sequence[SymbolicDim], counted: CountedDims
    ) -> None:
        self._dims, self._counted = tuple(dims), counted
        self._packings = captured.packings
        self._names_of_counts = [dim.name for dim in captured.counted]

    @property
    def program_dims(self) -> tuple[SymbolicDim, ...]:
        """The dims that plans are made for: those of batches, then those that follow from data."""
        by_name = {dim.name: dim for dim in self._dims}
        tokens = []
        for packing in self._packings:
            bounds = [by_name[name].last for name in (packing.batch, packing.length)]
            product = packing.times * math.prod(bound or 0 for bound in bounds)
            most = None if None in bounds else product
            tokens.append(SymbolicDim(packing.tokens, 1, most))
        counted = [SymbolicDim(name, 0) for name in self._names_of_counts]
        return (*self._dims, *tokens, *counted)

    def complete(self, given: Mapping[str, int]) -> dict[str, int]:
        """Check sizes; add those that follow from data, by what they can be at most.

        The numbers of rows that are computed may be told.

        Raises `ShapeRangeError`: a size is missing, unknown or outside its range.
        """
        counts = {name: given[name] for name in self._counted.at_entry if name in given}
        told = {packing.tokens for packing in self._packings}.union(counts)
        sizes = {name: value for name, value in given.items() if name not in told}
        self._check(sizes)
        for packing in self._packings:
            most = packing.positions(sizes)
            count = given.get(packing.tokens, most)
            if not 0 <= count <= most:
                sequences, length = packing.sequences(sizes), sizes[packing.length]
                raise ShapeRangeError(
                    f"{packing.tokens}={count}; allowed is 0 .. {most} = {sequences} * {length}: "
                    "the positions of the batch that are computed."
                )
            sizes[packing.tokens] = rounded(count, most)
        return self._counted.complete(sizes, counts)

    def as_many_as_there_are(self, given: Mapping[str, int]) -> dict[str, int]:
        """Let a number of rows that was given hold as far as a shape has any."""
        dims = dict(given)
        for packing in self._packings:
            if packing.tokens in dims:
                sizes = {name: dims.get(name, 1) for name in (packing.batch, packing.length)}
                dims[packing.tokens] = min(dims[packing.tokens], packing.positions(sizes))
        return dims

    def _check(self, given: Mapping[str, int]) -> None:
        names = [dim.name for dim in self._dims]
        if set(given) != set(names):
            raise ShapeRangeError(
                f"Give one size for each of the dims {', '.join(names)}; got {', '.join(given)}."
            )
        for dim in self._dims:
            size = given[dim.name]
            if isinstance(size, bool) or not hasattr(size, "__index__"):
                raise ShapeRangeError(f"{dim.name}={size!r} is no whole number, as sizes are.")
            if size not in dim:
                raise ShapeRangeError(f"{dim.name}={given[dim.name]}; allowed is {dim}.")
