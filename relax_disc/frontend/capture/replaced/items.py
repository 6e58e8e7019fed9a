"""``x[place]`` and ``x[place] = value`` where the place holds sizes, numbers of steps, or data.

PyTorch's own make numbers of the sizes among indices that are tensors, or where they write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from relax_disc.frontend.capture.loops.bounds import ask_for_longer, never_negative
from relax_disc.frontend.capture.loops.numbers import numbers_as_tensors
from relax_disc.frontend.capture.loops.recorded import LoopRefusal, active
from relax_disc.frontend.capture.loops.rows import window
from relax_disc.frontend.capture.replaced import data_places
from relax_disc.frontend.capture.sizes.operands import number_of_data


def _get_item(x: Tensor, place: Any) -> Tensor | None:
    """Read what ``x[place]`` reads; None: PyTorch's own does."""
    masked = _with_masks(place)
    if masked is not place:
        return x[masked]
    if not isinstance(place, tuple) or not any(isinstance(item, Tensor) for item in place):
        return None
    if not any(map(_is_number, place)):
        return None
    selected = _selected(x, place)
    return None if selected is None else selected.view[tuple(selected.rest)]


def _with_masks(place: Any) -> Any:
    """Write a mask of bytes among indices as one of truths; the place itself if there is none."""
    if isinstance(place, Tensor) and place.dtype == torch.uint8:
        return place.bool()
    items = place if isinstance(place, tuple) else ()
    made = [_with_masks(item) if isinstance(item, Tensor) else item for item in items]
    return place if all(a is b for a, b in zip(made, items, strict=True)) else tuple(made)


def _slice(x: Tensor, axis: int, start: Any, stop: Any, step: Any) -> Tensor | None:
    """Read a part such as ``x[:, t : t + 3]`` in a loop, if it is as long in each step.

    A part that ends behind the axis at every length, as the last of several, ends with it.
    """
    # So torch.export writes what is indexed by sizes.
    if step != 1 or not isinstance(start, torch.SymInt) or not isinstance(stop, torch.SymInt):
        return None
    extent: Any = x.shape[axis]
    if not (_is_of_step(start) and _is_of_step(stop)):
        is_last = isinstance(extent, torch.SymInt) and never_negative(stop - extent)
        if is_last and never_negative(start) and never_negative(extent - start):
            ask_for_longer(extent - start)
            return x.narrow(axis, start, extent - start)
        return data_places.picked_places(x, axis, start, stop)
    return window(x, axis, start, stop)


def _set_item(x: Tensor, place: Any, value: Any) -> Any:
    """Write what ``x[place] = value`` writes; None: PyTorch's own does.

    Beside numbers of steps there may be slices, to which a number or a tensor of one is written.
    """
    items = place if isinstance(place, tuple) else (place,)
    if (number := number_of_data(value)) is not None:
        x[place] = number
        return x
    if _write_places(x, items, value):
        return x
    bounds = [x for item in items if isinstance(item, slice) for x in (item.start, item.stop)]
    of_step = any(_is_of_step(number) for number in (*items, *bounds))
    if not of_step and not any(map(_is_number, items)):
        return None
    selected = _selected(x, items)
    if selected is None:
        if of_step:
            raise LoopRefusal("a loop writes to positions other than `[:, t]` or `[t, a:b]`")
        return None
    view, rest = selected.view, selected.rest
    if of_step and not selected.picked:
        return _write_in_step(view, rest, value)
    for each in selected.picked:
        data_places.forgive(each.source, each.axis, each.index, value)
    if all(isinstance(item, slice) and item == slice(None) for item in rest):
        view.copy_(_as_tensor(value, view))
    else:
        view[tuple(rest)] = value
    for each in reversed(selected.picked):
        data_places.put_back(each.source, each.axis, each.place, each.part)
    return view


def _write_places(x: Tensor, items: Sequence[Any], value: Any) -> bool:
    """Write to a slice that begins where data tell, beside whole axes; whether there was one."""
    if (whole := next((k for k, item in enumerate(items) if item is Ellipsis), None)) is not None:
        rest = [slice(None)] * (x.dim() - len(items) + 1)
        items = [*items[:whole], *rest, *items[whole + 1 :]]
    parts = [(axis, item) for axis, item in enumerate(items) if item != slice(None)]
    if len(parts) != 1 or not isinstance(parts[0][1], slice) or parts[0][1].step not in (None, 1):
        return False
    axis, part = parts[0]
    places = data_places.places_of(x, axis, part.start, part.stop)
    if places is None:
        return False
    data_places.forgive(x, axis, part.start, value)
    shape: list[Any] = list(x.shape)
    shape[axis] = places.shape[0]
    x.index_copy_(axis, places, _as_tensor(value, x).to(x.dtype).expand(shape))
    return True


@dataclass(frozen=True, slots=True)
class _Picked:
    """What was picked of a tensor, at a place of an axis that is data."""

    source: Tensor
    axis: int
    index: Any
    place: Tensor
    part: Tensor


@dataclass(slots=True)
class _Selected:
    """A tensor with the numbers among the indices applied, and the indices that are left for it."""

    view: Tensor
    rest: list[Any] = field(default_factory=list)
    picked: list[_Picked] = field(default_factory=list)


def _selected(x: Tensor, items: Sequence[Any]) -> _Selected | None:
    """Apply the numbers among the indices, as PyTorch does before the others.

    Returned: None where an index is of another kind.
    """
    wanted = sum(_axes(item) for item in items)
    made, axis = _Selected(x), 0
    for item in items:
        if isinstance(item, bool) or not isinstance(item, _KINDS):
            return None
        if (place := data_places.place_of(item)) is not None:
            part = data_places.picked(made.view, axis, place)
            made.picked.append(_Picked(made.view, axis, item, place, part))
            made.view = part
            continue
        if isinstance(item, int | torch.SymInt):
            made.view = made.view.select(axis, item)
            continue
        own = [slice(None)] * (x.dim() - wanted) if item is Ellipsis else [item]
        axis += sum(_axes(each) for each in own)
        made.rest += own
    return made


def _is_number(item: Any) -> bool:
    """Whether an index is a size, the number of a step, or a place that is data."""
    return isinstance(item, torch.SymInt) or data_places.place_of(item) is not None


_KINDS = int | torch.SymInt | slice | Tensor | type(None) | type(Ellipsis)


def _axes(item: Any) -> int:
    """How many axes an index reads."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _write_in_step(view: Tensor, rest: Sequence[Any], value: Any) -> Tensor:
    within = []
    for axis, item in enumerate(rest):
        if not isinstance(item, slice) or item.step not in (None, 1):
            raise LoopRefusal("a loop writes to positions other than `[:, t]` or `[t, a:b]`")
        if item != slice(None):
            within.append((axis, item))
    value = _as_tensor(value, view)
    if within and value.dim():
        raise LoopRefusal("a loop writes several values to a slice; write one, or all of `[:, t]`")
    for axis, part in within:
        places = torch.arange(view.shape[axis], device=view.device)
        shape = [-1] + [1] * (view.dim() - axis - 1)
        value = torch.where(_in_slice(places, part, view.shape[axis]).reshape(shape), value, view)
    return view.copy_(value)


def _as_tensor(value: Any, view: Tensor) -> Tensor:
    """Make what is written a tensor, without axes of 1 in front that the view does not have."""
    if not isinstance(value, Tensor):
        return view.new_full((), value)
    while value.dim() > view.dim() and isinstance(value.shape[0], int) and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


def _in_slice(places: Tensor, part: slice, extent: Any) -> Tensor:
    """Which of the places of an axis are in a slice; bounds below 0 count from the end."""
    inside = places >= 0
    for bound, is_first in ((part.start, True), (part.stop, False)):
        if bound is None:
            continue
        _, number = numbers_as_tensors((places, bound))
        number = number if isinstance(number, Tensor) else torch.full_like(places, number)
        number = torch.where(number < 0, number + extent, number)
        inside = inside & ((places >= number) if is_first else (places < number))
    return inside


def _is_of_step(number: Any) -> bool:
    """Whether a number is made of that of the step that a loop records."""
    loops = active()
    if not isinstance(number, torch.SymInt) or loops is None or loops.inside is None:
        return False
    return bool(number.node.expr.free_symbols & loops.step.node.expr.free_symbols)


REPLACED: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _get_item,
    Tensor.__setitem__: _set_item,
    torch.ops.aten.slice: _slice,
}
