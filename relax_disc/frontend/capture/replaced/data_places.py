"""``x[:, i]`` where the place ``i`` is data: a tensor without axes, or a number taken out of one.

PyTorch takes the number out to make a view, whose place in memory a program cannot know.  Here the
place stays a tensor, by which rows are picked; what is written there is put back.

So are places that begin where data tell and are as many as a size tells, ``queue[:, i : i + n]``.

Limits: what is picked is a copy.  A model is refused that writes into it otherwise than by
``x[:, i] = value`` or ``x[:, i] += value``, or that reads it when its source has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture import example_values
from relax_disc.frontend.capture.loops.sequences import text_of
from relax_disc.frontend.capture.sizes.exact import size_of
from relax_disc.frontend.capture.sizes.numbers import item as size_of_tensor
from relax_disc.frontend.capture.sizes.operands import number_of_data
from relax_disc.frontend.capture.source_lines import SourceLine, calling_line
from relax_disc.frontend.capture.versions import times_written

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)


def place_of(index: Any) -> Tensor | None:
    """Return a place that only data tell as a tensor without axes; None of anything else."""
    if isinstance(index, Tensor):
        is_place = index.dim() == 0 and index.dtype in _WHOLE and size_of_tensor(index) is None
        return index if is_place else None
    return number_of_data(index) if isinstance(index, torch.SymInt) else None


@dataclass(slots=True)
class _Copy:
    """What was picked, from which axis of what, and how often both had been written into."""

    picked: Tensor
    source: Tensor
    axis: int
    index: Any
    line: SourceLine
    writes: int
    source_writes: int


_copies: dict[int, _Copy] = {}
"""By the identity of what was picked."""


@contextlib.contextmanager
def copies_unwritten() -> Iterator[None]:
    """Refuse an export, when it ends, in which a copy was written into.

    Raises `UnsupportedOperatorError`: what was written would be lost.
    """
    before = dict(_copies)
    _copies.clear()
    try:
        yield
        for copy in _copies.values():
            if times_written(copy.picked) != copy.writes:
                raise _refused(copy, "written into")
    finally:
        _copies.clear()
        _copies.update(before)


def check_use(args: Sequence[Any]) -> None:
    """Look at what a call is given.

    Raises `UnsupportedOperatorError`: a copy of what has been written into since, which a view
    would show.
    """
    for leaf in pytree.tree_leaves(args) if _copies else ():
        copy = _copies.get(id(leaf))
        if copy is not None and times_written(copy.source) != copy.source_writes:
            raise _refused(copy, "read when its source has changed")


def forgive(source: Tensor, axis: int, index: Any, value: Any) -> None:
    """Take note that a copy goes back to its place: ``x[i] += 1`` writes into it first.

    ``source``: of which a place of an axis is written. ``value``: a copy or a view of it.
    """
    for copy in _copies.values() if isinstance(value, Tensor) else ():
        if copy.axis == axis and _origin(value) is _origin(copy.picked):
            if _is_same_index(copy.index, index) and _is_same_view(copy.source, source):
                copy.writes = times_written(value)


def _refused(copy: _Copy, what: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{copy.line}: what x[i] picks is a copy where i is data, and it is {what} afterwards; "
        "write x[i] = value or x[i] += value, and pick again what has changed.",
        (("Tensor.__getitem__", str(copy.line)),),
    )


def _origin(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x if x._base is None else x._base


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same part of one memory; their sizes are not compared."""
    if one is other:
        return True
    with torch._C.DisableTorchFunction():
        parts = [[text_of(n) for n in (x.storage_offset(), *x.stride())] for x in (one, other)]
    return _origin(one) is _origin(other) and parts[0] == parts[1]


def _is_same_index(one: Any, other: Any) -> bool:
    """Whether two indices are one tensor, or numbers that were taken out of it."""
    example = example_values.active()
    if example is not None:
        one, other = (x if isinstance(x, Tensor) else example.taken(x) for x in (one, other))
    return one is not None and one is other


def picked(x: Tensor, axis: int, place: Tensor) -> Tensor:
    """Pick what lies at a place of an axis, which is left out; below 0 it counts from the end."""
    return x.index_select(axis, _from_start(x, axis, place)).squeeze(axis)


def put_back(x: Tensor, axis: int, place: Tensor, part: Tensor) -> None:
    """Write what was picked to where it was."""
    x.index_copy_(axis, _from_start(x, axis, place), part.unsqueeze(axis))


def places_of(x: Tensor, axis: int, start: Any, stop: Any) -> Tensor | None:
    """List the places ``start:stop`` of an axis where data tell the start, and sizes how many.

    None of other bounds.  That they are all there is asserted: eager would read or write fewer.
    """
    first = place_of(start) if isinstance(start, torch.SymInt) else None
    if first is None or not isinstance(stop, int | torch.SymInt):
        return None
    count: Any = stop - start
    if free_unbacked_symbols(count):
        return None
    if isinstance(count, torch.SymInt):  # not as a difference of what data tell
        count = size_of(count.node.expr, count.node.shape_env)
    last: Any = first + count
    torch.ops.aten._assert_async.msg(
        (first >= 0).logical_and(last <= x.shape[axis]),
        f"{calling_line()}: the places {text_of(count)} long that data tell do not all lie on "
        f"axis {axis}; choose where they start so that they do.",
    )
    return first + torch.arange(count, device=x.device)


def picked_places(x: Tensor, axis: int, start: Any, stop: Any) -> Tensor | None:
    """Read ``start:stop`` of an axis as `places_of` finds it; None where it does not."""
    places = places_of(x, axis, start, stop)
    if places is None:
        return None
    return _noted(x.index_select(axis, places), x, axis, start)


def _noted(made: Tensor, x: Tensor, axis: int, index: Any) -> Tensor:
    """Keep in mind that what was picked is a copy."""
    written = times_written(made), times_written(x)
    _copies[id(made)] = _Copy(made, x, axis, index, calling_line(), *written)
    return made


def _from_start(x: Tensor, axis: int, place: Tensor) -> Tensor:
    place = place.to(torch.int64)
    return torch.where(place < 0, place + x.shape[axis], place).reshape(1)


def _select(x: Tensor, dim: int, index: Any) -> Tensor | None:
    """A place that is data stays a tensor; None: PyTorch's own."""
    place = place_of(index)
    if place is None:
        return None
    return _noted(picked(x, dim, place), x, dim % x.dim(), index)


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor | None:
    """A place without axes is a list of one."""
    return x.index_select(dim, index.reshape(1)) if index.dim() == 0 else None


def _roll(x: Tensor, shifts: Any, dims: Any = ()) -> Tensor | None:
    """Positions by arithmetic where data tell how far; None: PyTorch's own."""
    shifts, dims = (each if isinstance(each, Sequence) else [each] for each in (shifts, dims))
    places = [place_of(shift) for shift in shifts]
    if len(dims) != len(places) or all(place is None for place in places):
        return None
    for place, shift, axis in zip(places, shifts, dims, strict=True):
        if place is None:
            x = x.roll(shift, axis)
        else:
            where = torch.arange(x.shape[axis], device=x.device) - place
            x = x.index_select(axis, where.remainder(x.shape[axis]))
    return x


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.select: _select,
    Tensor.select: _select,
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
    torch.roll: _roll,
    Tensor.roll: _roll,
}
