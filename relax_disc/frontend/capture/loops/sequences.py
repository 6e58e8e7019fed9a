"""Lists whose length is a dim: ``range(n)``, rows of a tensor, what a loop appended, their sums.

An element is known as a function of its place, so that slices, single elements and the length
follow from the sizes, and rows of a tensor are joined without being cut.  What needs each element
by itself, such as a loop that is not prepared, fixes the length to that of the example, as Python's
own lists do.

Limits: bounds of slices are plain numbers; what is neither a number nor a tensor is not joined.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.loops.bounds import bounds_of
from relax_disc.frontend.capture.source_lines import calling_line

Run = tuple[Any, Callable[[Any], Any]]
"""How many elements follow each other, and what each is, by its place among them."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What lies along an axis of a tensor, as elements of a list: each ``step`` from ``start``."""

    tensor: Tensor
    axis: int = 0
    start: Any = 0
    step: int = 1

    def __call__(self, place: Any) -> Tensor:
        """Return an element, without that axis."""
        return self.tensor.select(self.axis, self.start + self.step * place)

    def moved(self, scale: int, shift: Any) -> Rows:
        """Return the rows of which ``k`` is the row ``scale * k + shift`` of these."""
        return replace(self, start=self.start + self.step * shift, step=self.step * scale)

    def stacked(self, count: Any) -> Tensor:
        """Return the first elements as one tensor ``[count, *shape]``."""
        rows = self.tensor.movedim(self.axis, 0) if self.axis else self.tensor
        if self.step != 1:
            return rows[torch.arange(count, device=rows.device) * self.step + self.start]
        is_whole = isinstance(self.start, int) and self.start == 0
        if is_whole and statically_known_true(count == rows.shape[0]):
            return rows
        return rows.narrow(0, self.start, count)


@dataclass(frozen=True, slots=True, eq=False)
class Tuples:
    """Rows of several tensors, as elements that hold one of each."""

    rows: tuple[Rows, ...]
    structure: pytree.TreeSpec

    def __call__(self, place: Any) -> Any:
        """Return an element."""
        return pytree.tree_unflatten([rows(place) for rows in self.rows], self.structure)

    def moved(self, scale: int, shift: Any) -> Tuples:
        """Return those of which ``k`` is the element ``scale * k + shift`` of these."""
        rows = tuple(rows.moved(scale, shift) for rows in self.rows)
        return replace(self, rows=rows)


def _moved(at: Callable[[Any], Any], scale: int, shift: Any) -> Callable[[Any], Any]:
    if isinstance(at, Rows | Tuples):
        return at.moved(scale, shift)
    return lambda place: at(scale * place + shift)


class _Mark:
    """What PyTorch finds in a list of symbolic length: it leads to what reads one, or refuses."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what cannot read such a list."""
        name = getattr(func, "__name__", str(func))
        raise _refusal(f"what {name} makes of it; torch.stack, torch.cat and [-1] can read it")


class DynamicList(list):
    """A list of runs, of which some have a symbolic length.

    PyTorch's functions read the memory of a list as it is: there stands a mark alone.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        super().__init__(self.mark())
        self._runs = [run for run in runs if not (isinstance(run[0], int) and run[0] == 0)]

    @staticmethod
    def mark() -> list:
        """Return what stands in the memory of such a list."""
        return [_Mark()]

    @classmethod
    def of(cls, values: Any) -> DynamicList:
        """Make one of a list or tuple as well."""
        if isinstance(values, DynamicList):
            return DynamicList(values._runs)
        return DynamicList([_single(value) for value in values])

    @property
    def runs(self) -> Sequence[Run]:
        """The runs in order."""
        return tuple(self._runs)

    def length(self) -> Any:
        """Return the number of elements."""
        return sum(count for count, _ in self._runs)

    def at(self, index: Any) -> Any:
        """Return the element at a symbolic place of the only run."""
        ((_, at),) = self._runs
        return at(index)

    def as_numbers(self, device: Any) -> Tensor:
        """Return its elements, which are numbers that are made of their places, as a tensor."""
        places = [(torch.arange(n, device=device), at) for n, at in self._runs]
        return torch.cat([at(k) + torch.zeros_like(k) for k, at in places])

    def stacked(self) -> list[Tensor] | None:
        """Return its elements, which are tensors, in tensors ``[count, *shape]``; or None."""
        parts = self._parts()
        if parts is None or any(structure != _ONE for structure, _ in parts):
            return None
        return [tensors[0] for _, tensors in parts]

    def in_one_run(self) -> DynamicList | None:
        """Return a list of the same elements in one run; None where they are not alike."""
        if len(self._runs) == 1:
            return self
        parts = self._parts()
        if parts is None or any(structure != parts[0][0] for structure, _ in parts):
            return None
        structure, first = parts[0]
        for _, tensors in parts:
            pairs = zip(tensors, first, strict=True)
            if not all(is_same_shape(x.shape[1:], y.shape[1:]) for x, y in pairs):
                return None
        rows = tuple(Rows(torch.cat(each)) for each in zip(*(x for _, x in parts), strict=True))
        at = rows[0] if structure == _ONE else Tuples(rows, structure)
        return DynamicList([(self.length(), at)])

    def _parts(self) -> list[tuple[pytree.TreeSpec, list[Tensor]]] | None:
        """Stack what its elements hold, run by run; None where that is no tensor."""
        parts = []
        for count, at in self._runs:
            if isinstance(at, Rows):
                parts.append((_ONE, [at.stacked(count)]))
            elif isinstance(at, Tuples):
                parts.append((at.structure, [rows.stacked(count) for rows in at.rows]))
            elif not isinstance(count, int):
                return None
            else:
                for place in range(count):
                    leaves, structure = pytree.tree_flatten(at(place))
                    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
                        return None
                    parts.append((structure, [leaf.unsqueeze(0) for leaf in leaves]))
        return parts

    def __len__(self) -> int:
        return int(self.length())

    def __bool__(self) -> bool:
        return bool(least(self.length()) > 0 or self.length() > 0)

    def __iter__(self) -> Iterator[Any]:
        """Fix the length: what is not prepared goes on as it always did."""
        return (at(k) for count, at in self._runs for k in range(int(count)))

    def __reversed__(self) -> DynamicList:  # pyright: ignore[reportIncompatibleMethodOverride]
        return DynamicList(_reversed(self._runs))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and list(iter(self)) == list(iter(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __repr__(self) -> str:
        return f"<a list of {self.length()} elements>"

    def append(self, value: Any) -> None:
        """Put an element behind the last."""
        self._runs.append(_single(value))

    def extend(self, values: Any) -> None:
        """Put elements behind the last."""
        self._runs += DynamicList.of(values)._runs

    def reverse(self) -> None:
        """Turn the order round."""
        self._runs = _reversed(self._runs)

    def copy(self) -> DynamicList:
        """Return a list of the same elements."""
        return DynamicList(self._runs)

    def insert(self, index: Any, value: Any) -> None:
        """Put an element before the first; elsewhere is refused."""
        if index != 0:
            raise _refusal(f".insert({index}, ...)")
        self._runs.insert(0, _single(value))

    def pop(self, index: Any = -1) -> Any:
        """Take the first or the last element out."""
        if index not in (0, -1):
            raise _refusal(f".pop({index})")
        value = self[index]
        self._runs = list((self[1:] if index == 0 else self[:-1])._runs)
        return value

    def __add__(self, other: Any) -> DynamicList:
        if not isinstance(other, list | tuple):
            return NotImplemented
        return DynamicList([*self._runs, *DynamicList.of(other)._runs])

    def __radd__(self, other: Any) -> DynamicList:
        return DynamicList.of(other) + self if isinstance(other, list | tuple) else NotImplemented

    def __iadd__(self, other: Any) -> DynamicList:  # pyright: ignore
        self.extend(other)
        return self

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
        if step == -1 and place.start is None and place.stop is None:
            return DynamicList(_reversed(runs))
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


class HiddenList(list):
    """Lies where a step finds a list that it appends to by a name of its own: none may read it."""

    def __init__(self) -> None:
        super().__init__(DynamicList.mark())


_ONE = pytree.tree_structure(torch.empty(0))


def _refused(what: str) -> Callable[..., Any]:
    def method(*_: Any) -> Any:
        raise _refusal(what)

    return method


for _name in ("remove", "clear", "sort", "index", "count"):
    setattr(DynamicList, _name, _refused(f"`.{_name}`"))
for _name in ("__setitem__", "__delitem__", "__contains__", "__mul__", "__rmul__", "__imul__"):
    setattr(DynamicList, _name, _refused(f"`.{_name}`"))


_COMPARE = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
for _name in ("__bool__", *_COMPARE, *(set(dir(list)) - set(dir(object)))):
    setattr(HiddenList, _name, _refused(f"`{_name}` while a loop appends to it"))


def _single(value: Any) -> Run:
    return 1, lambda _: value


def _reversed(runs: Sequence[Run]) -> list[Run]:
    return [(n, _moved(at, -1, n - 1)) for n, at in reversed(runs)]


def _without(runs: Sequence[Run], left: int) -> list[Run]:
    """Leave out the first elements."""
    kept: list[Run] = []
    for place, (count, at) in enumerate(runs):
        if left == 0:
            kept.append((count, at))
            continue
        if not isinstance(count, int) and least(count) < left:
            if len(kept) + 1 < len(runs) - place:
                raise _refusal("a slice whose first element lies here or there")
            kept.append((torch.sym_max(count - left, 0), _moved(at, 1, left)))
            left = 0
            continue
        gone = min(left, count) if isinstance(count, int) else left
        kept.append((count - gone, _moved(at, 1, gone)))
        left -= gone
    return kept


def _last(runs: Sequence[Run], wanted: int) -> list[Run]:
    """Leave the last elements."""
    kept: list[Run] = []
    for count, at in reversed(runs):
        if least(count) >= wanted:
            kept.insert(0, (wanted, _moved(at, 1, count - wanted)))
            return kept
        if not isinstance(count, int):
            raise _refusal("a slice of more elements than there are at some length")
        kept.insert(0, (count, at))
        wanted -= count
    return kept


def _every(runs: Sequence[Run], step: int) -> list[Run]:
    """Leave each so-manieth element."""
    if step == 1:
        return list(runs)
    kept: list[Run] = []
    skipped: int | None = 0  # elements until the next one that stays
    for count, at in runs:
        if skipped is None:
            raise _refusal(f"a slice of step {step} over a run of symbolic length and what follows")
        taken: Any = (count - skipped + step - 1) // step
        if least(count) < skipped:
            taken = max(taken, 0) if isinstance(taken, int) else torch.sym_max(taken, 0)
        kept.append((taken, _moved(at, step, skipped)))
        skipped = (skipped - count) % step if isinstance(count, int) else None
    return kept


class DynamicRange(DynamicList):
    """``range`` with a symbolic length."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        padded = (0, *arguments) if len(arguments) == 1 else arguments
        self.start, self.stop, self.step = (*padded, 1)[:3]
        super().__init__([(self._count(), lambda index: self.start + self.step * index)])

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
    low = bounds_of(size).lower
    return int(low) if low.is_Integer else -sys.maxsize


def fixed(size: Any) -> int | None:
    """Return the number that a size is over the whole of its range; None where it varies."""
    if not isinstance(size, torch.SymInt):
        return size
    bounds = bounds_of(size)
    return int(bounds.lower) if bounds.is_singleton() else None


def is_same(one: Any, other: Any) -> bool:
    """Whether two sizes are written alike; to ask PyTorch whether they are equal is a guard."""
    return text_of(one) == text_of(other)


def is_same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are written alike."""
    return [*map(text_of, one)] == [*map(text_of, other)]


def text_of(size: Any) -> str:
    """Write a size down."""
    return str(size.node.expr if isinstance(size, torch.SymInt) else size)


def _refusal(what: str) -> UnsupportedOperatorError:
    line = str(calling_line())
    return UnsupportedOperatorError(
        f"{line}: a list whose length is a dim is asked for {what}; compute it from the length, or "
        "with torch.arange.",
        (("list of dynamic length", line),),
    )
