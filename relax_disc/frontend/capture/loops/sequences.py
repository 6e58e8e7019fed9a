"""Lists of numbers whose length is a dim: ``range(n)``, ``list(range(n))[1:-1:2]``, and their sums.

An element is known as a function of its place, so that slices, single elements and the length
follow from the sizes.  What needs each element by itself, such as a loop that is not prepared,
fixes the length to that of the example, as Python's own lists do.

Limits: bounds of slices are plain numbers, their steps positive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.source_lines import calling_line

_Run = tuple[Any, Callable[[Any], Any]]
"""How many elements follow each other, and what each is, by its place among them."""


class DynamicList(Sequence):
    """A sequence of runs, of which some have a symbolic length."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._runs = [run for run in runs if not (isinstance(run[0], int) and run[0] == 0)]

    @classmethod
    def of(cls, values: Any) -> DynamicList:
        """Make one of a list or tuple as well."""
        if isinstance(values, DynamicList):
            return DynamicList(values._runs)
        return DynamicList([(1, lambda _, value=value: value) for value in values])

    def length(self) -> Any:
        """Return the number of elements."""
        return sum(count for count, _ in self._runs)

    def at(self, index: Any) -> Any:
        """Return the element at a symbolic place of the only run."""
        ((_, at),) = self._runs
        return at(index)

    def __len__(self) -> int:
        return int(self.length())

    def __bool__(self) -> bool:
        return bool(least(self.length()) > 0 or self.length() > 0)

    def __iter__(self) -> Iterator[Any]:
        """Fix the length: what is not prepared goes on as it always did."""
        return (at(k) for count, at in self._runs for k in range(int(count)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | DynamicList) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refusal(f"`.{name}`")

    def append(self, value: Any) -> None:
        """Put an element behind the last."""
        self._runs.append((1, lambda _: value))

    def __add__(self, other: Any) -> DynamicList:
        if not isinstance(other, list | tuple | DynamicList):
            return NotImplemented
        return DynamicList([*self._runs, *DynamicList.of(other)._runs])

    def __radd__(self, other: Any) -> DynamicList:
        return DynamicList.of(other) + self if isinstance(other, list | tuple) else NotImplemented

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return self._slice(place)
        place = place.__index__() if not isinstance(place, torch.SymInt) else place
        if isinstance(place, int):
            back = place < 0
            left: Any = -1 - place if back else place
            for count, at in reversed(self._runs) if back else self._runs:
                if least(count) > left:
                    return at(count - 1 - left if back else left)
                if not isinstance(count, int):
                    break
                left -= count
        elif len(self._runs) == 1:
            return self.at(place)
        raise _refusal(f"[{place}], which is not there at every length")

    def _slice(self, place: slice) -> DynamicList:
        if any(not isinstance(x, int | None) for x in (place.start, place.stop, place.step)):
            raise _refusal(f"a slice from {place.start} to {place.stop}; give plain numbers")
        runs, step = self._runs, 1 if place.step is None else place.step
        if step < 1:
            raise _refusal(f"a slice of step {step}")
        start, stop = place.start or 0, place.stop
        if start < 0:
            runs = _last(runs, -start)
        if stop is not None and stop < 0:
            runs = _reversed(_without(_reversed(runs), -stop))
        elif stop is not None:
            if start < 0:
                raise _refusal(f"[{start}:{stop}]")
            runs = _reversed(_last(_reversed(runs), stop))
        if start > 0:
            runs = _without(runs, start)
        return DynamicList(_every(runs, step))


def _reversed(runs: Sequence[_Run]) -> list[_Run]:
    return [(n, lambda k, n=n, at=at: at(n - 1 - k)) for n, at in reversed(runs)]


def _without(runs: Sequence[_Run], left: int) -> list[_Run]:
    """Leave out the first elements."""
    kept: list[_Run] = []
    for count, at in runs:
        if left == 0:
            kept.append((count, at))
            continue
        if not isinstance(count, int) and least(count) < left:
            if len(kept) + 1 < len(runs) - runs.index((count, at)):
                raise _refusal("a slice whose first element lies here or there")
            kept.append((torch.sym_max(count - left, 0), lambda k, at=at, d=left: at(k + d)))
            left = 0
            continue
        gone = min(left, count) if isinstance(count, int) else left
        kept.append((count - gone, lambda k, at=at, d=gone: at(k + d)))
        left -= gone
    return kept


def _last(runs: Sequence[_Run], wanted: int) -> list[_Run]:
    """Leave the last elements."""
    kept: list[_Run] = []
    for count, at in reversed(runs):
        if least(count) >= wanted:
            kept.insert(0, (wanted, lambda k, at=at, d=count - wanted: at(k + d)))
            return kept
        if not isinstance(count, int):
            raise _refusal("a slice of more elements than there are at some length")
        kept.insert(0, (count, at))
        wanted -= count
    return kept


def _every(runs: Sequence[_Run], step: int) -> list[_Run]:
    """Leave each so-manieth element."""
    if step == 1:
        return list(runs)
    kept: list[_Run] = []
    skipped: int | None = 0  # elements until the next one that stays
    for count, at in runs:
        if skipped is None:
            raise _refusal(f"a slice of step {step} over a run of symbolic length and what follows")
        taken: Any = (count - skipped + step - 1) // step
        if least(count) < skipped:
            taken = max(taken, 0) if isinstance(taken, int) else torch.sym_max(taken, 0)
        kept.append((taken, lambda k, at=at, d=skipped: at(step * k + d)))
        skipped = (skipped - count) % step if isinstance(count, int) else None
    return kept


class DynamicRange(DynamicList):
    """``range`` with a symbolic length."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        padded = (0, *arguments) if len(arguments) == 1 else arguments
        self.start, self.stop, self.step = (*padded, 1)[:3]
        super().__init__([(self._count(), lambda index: self.start + self.step * index)])

    def __reversed__(self) -> DynamicList:  # pyright: ignore[reportIncompatibleMethodOverride]
        return DynamicList(_reversed(self._runs))

    def _count(self) -> Any:
        distance: Any = self.stop - self.start
        if self.step == 1:
            count = distance
        elif self.step == -1:
            count = -distance
        else:
            count = (distance + self.step - (1 if self.step > 0 else -1)) // self.step
        return count if least(count) >= 0 else torch.sym_max(count, 0)


def least(size: Any) -> int:
    """Return the least that a size can be."""
    if not isinstance(size, torch.SymInt):
        return size
    bounds: Any = size.node.shape_env.bound_sympy(size.node.expr)
    return int(bounds.lower) if bounds.lower.is_Integer else -sys.maxsize


def fixed(size: Any) -> int | None:
    """Return the number that a size is over the whole of its range; None where it varies."""
    if not isinstance(size, torch.SymInt):
        return size
    bounds: Any = size.node.shape_env.bound_sympy(size.node.expr)
    return int(bounds.lower) if bounds.is_singleton() else None


def _refusal(what: str) -> UnsupportedOperatorError:
    line = str(calling_line())
    return UnsupportedOperatorError(
        f"{line}: a list whose length is a dim is asked for {what}; compute it from the length, or "
        "with torch.arange.",
        (("list of dynamic length", line),),
    )


def made_list(*values: Any) -> Any:
    """``list``, which leaves the length of a range symbolic."""
    if len(values) == 1 and isinstance(values[0], DynamicList):
        return DynamicList.of(values[0])
    return list(*values)


def as_tensor(data: Any, **options: Any) -> Tensor | None:
    """``torch.tensor`` of a list of symbolic length; None for other values."""
    if not isinstance(data, DynamicList):
        return None
    device = options.get("device")
    places = [(torch.arange(n, device=device), at) for n, at in data._runs]
    return torch.cat([at(k) + torch.zeros_like(k) for k, at in places]).to(options.get("dtype"))
