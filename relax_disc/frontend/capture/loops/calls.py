"""Python's own functions in prepared code, where a list or a tensor is as long as a dim.

For all else each is what it stands for.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_disc.frontend.capture.loops.bounds import check_last_step, never_negative
from relax_disc.frontend.capture.loops.recorded import active
from relax_disc.frontend.capture.loops.rows import dynamic_range, same_length, sequence_of
from relax_disc.frontend.capture.loops.sequences import DynamicList, Run, Tuples, is_same_shape
from relax_disc.frontend.capture.loops.steps import steps

_MADE = "the list that it makes"  # no variable has this name


def made(kind: type, *values: Any) -> Any:
    """``list`` or ``tuple``; of a symbolic length both are a list."""
    found = sequence_of(values[0]) if len(values) == 1 else None
    return kind(*values) if found is None else DynamicList.of(found)


def displayed(kind: type, *parts: tuple[bool, Any]) -> Any:
    """``[*a, b]``; each part with whether it has a star."""
    made: list[Any] = []
    for has_star, value in parts:
        if not has_star:
            made.append(value)
        elif isinstance(value, DynamicList):
            made = DynamicList.of(made) + value
        else:
            made.extend(value)
    return made if isinstance(made, DynamicList) else kind(made)


def summed(values: Any, start: Any = 0) -> Any:
    """``sum``."""
    made = sequence_of(values)
    parts = made.stacked() if made is not None else None
    if parts is None:
        return builtins.sum(values, start)
    return builtins.sum((part.sum(0) for part in parts), start)


def lesser(*values: Any, **options: Any) -> Any:
    """``min``, of two sizes of which it is known which is less."""
    return _extreme(builtins.min, values, options, lambda one, other: other - one)


def greater(*values: Any, **options: Any) -> Any:
    """``max``, of two sizes of which it is known which is greater."""
    return _extreme(builtins.max, values, options, lambda one, other: one - other)


def _extreme(
    plain: Callable[..., Any], values: Any, options: Any, lead: Callable[[Any, Any], Any]
) -> Any:
    """``lead``: 0 or more where the first of two is the result."""
    are_sizes = len(values) == 2 and all(type(each) in (int, torch.SymInt) for each in values)
    if options or not are_sizes or not any(isinstance(each, torch.SymInt) for each in values):
        return plain(*values, **options)
    pairs = (values, values[::-1])
    for one, other in pairs:
        if never_negative(lead(one, other)):
            return one
    for one, other in pairs:
        check_last_step(lead(one, other), "takes another size")
    return plain(*values)


def numbered(values: Any, start: Any = 0) -> Any:
    """``enumerate``, as what a loop runs over."""
    made = sequence_of(values)
    if made is None:
        return enumerate(values, start)
    runs, before = [], start
    for count, at in made.runs:
        runs.append((count, lambda k, at=at, first=before: (first + k, at(k))))
        before = before + count
    return DynamicList(runs)


def together(*values: Any, **options: Any) -> Any:
    """``zip``, as what a loop runs over."""
    made = [sequence_of(value) for value in values]
    runs = [each.runs for each in made if each is not None]
    if not runs or len(runs) != len(values) or not all(_are_along(runs[0], each) for each in runs):
        return builtins.zip(*values, **options)  # noqa: B905
    return DynamicList([_together(each) for each in zip(*runs, strict=True)])


def _are_along(one: Sequence[Run], other: Sequence[Run]) -> bool:
    """Whether the runs of two lists are as long as each other."""
    return len(one) == len(other) and all(
        same_length(n, m) for (n, _), (m, _) in zip(one, other, strict=True)
    )


def _together(runs: Sequence[Run]) -> Run:
    return runs[0][0], lambda k: tuple(at(k) for _, at in runs)


def transposed(values: Any) -> Any:
    """``zip(*values)``."""
    if isinstance(values, DynamicList) and len(values.runs) == 1:
        ((count, at),) = values.runs
        if isinstance(at, Tuples):
            return iter([DynamicList([(count, rows)]) for rows in at.rows])
    return zip(*values)  # noqa: B905


def backwards(values: Any) -> Any:
    """``reversed``, as what a loop runs over."""
    made = sequence_of(values)
    return reversed(values if made is None or isinstance(values, Tensor) else made)


def placed(x: Any, index: Any) -> Any:
    """``index`` of ``x[index]``, in which lists of numbers are tensors."""
    if not isinstance(x, Tensor):
        return index
    items = index if isinstance(index, tuple) else (index,)
    made = [i.as_numbers(x.device) if isinstance(i, DynamicList) else i for i in items]
    return tuple(made) if isinstance(index, tuple) else made[0]


def read(x: Any, index: Any) -> Any:
    """``x[index]``."""
    return x[placed(x, index)]


def masked(x: Any, y: Any, mask: Any) -> Any:
    """Write ``x[mask] = y[mask]``, and return what ``x`` is then."""
    loops = active()
    if loops is None or loops.inside is None or not _are_masked(x, y, mask):
        x[mask] = y[mask]
        return x
    wide = mask.reshape(*mask.shape, *(1 for _ in range(x.dim() - mask.dim())))
    return torch.where(wide, y.to(x.dtype), x)


def _are_masked(x: Any, y: Any, mask: Any) -> bool:
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
    are_alike = is_mask and isinstance(x, Tensor) and isinstance(y, Tensor)
    return are_alike and is_same_shape(x.shape, y.shape)


def mapped(values: Any, function: Callable[[Any], Any], line: int) -> Any:
    """``[function(value) for value in values]``, in a line of the calling file."""
    loop = steps(values, "", (), {"stored": (_MADE,)}, line)
    made: Any = []
    around = _captured(function)
    for value in loop:
        if loop.is_dynamic:
            (made,) = loop.enter({_MADE: made, **around})
        made.append(function(value))
        if loop.is_dynamic:
            made, _ = loop.leave({_MADE: made, **around})
    return made


def _captured(function: Any) -> dict[str, Any]:
    """List the variables around a function by name, but for those that are not bound."""
    found = {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


CALLS: Mapping[str, Callable[..., Any]] = {
    "range": dynamic_range,
    "list": functools.partial(made, list),
    "tuple": functools.partial(made, tuple),
    "sum": summed,
    "min": lesser,
    "max": greater,
}
"""By the name in Python."""

ITERATORS: Mapping[str, Callable[..., Any]] = {
    "enumerate": numbered,
    "zip": together,
    "reversed": backwards,
}
"""By the name in Python: those whose result only a loop may read."""
