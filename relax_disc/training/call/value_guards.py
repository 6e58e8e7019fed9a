"""Compare, before a step, the Python values that were read when it was compiled."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import Any

import numpy as np
import torch

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.capture.state.kinds import ARRAYS, is_plain
from relax_disc.frontend.capture.state.outer import ABSENT, Guard, code_facts
from relax_disc.frontend.capture.state.sources import is_replaced

_CONTAINERS = (list, set, dict, *ARRAYS)


class ValueGuards:
    """Values that a compiled program relies on, compared at each call.

    A comparison of identities in one loop finds nearly all that is unchanged; the rest is compared
    by value.
    """

    def __init__(self, guards: Sequence[Guard]) -> None:
        self._entries: list[tuple[Any, Any, Any, Guard]] = []
        self._cells: list[tuple[types.CellType, Any, Guard]] = []
        self._copies: list[tuple[Any, Any, Any, Guard]] = []
        self._shadowed = [
            (guard.shadow, guard.place.key, guard) for guard in guards if guard.shadow is not None
        ]
        self._absent = [(g.place.container, g.place.key, g) for g in guards if g.value is ABSENT]
        self._sizes: list[tuple[Any, int, Guard]] = []
        self._keys: list[list[Any]] = []
        self._numbers: list[tuple[Any, Guard]] = []
        self._forms: list[tuple[Any, Any, Guard]] = []
        self._shared: list[tuple[Any, Any, Guard]] = []
        for guard in guards:
            if guard.part in ("number", "type"):
                self._numbers.append((guard.place.get, guard))
            if guard.part == "length":
                self._sizes.append((guard.place.get, guard.value, guard))
            elif guard.part == "keys":
                self._keys.append([guard.place.get, guard.value, guard])
            elif guard.part == "form":
                self._forms.append((guard.place.get, guard.value, guard))
            elif guard.part == "same":
                self._shared.append((guard.place.get, guard.value[1].get, guard))
            if guard.part or guard.value is ABSENT:
                continue
            holder, value = guard.place.container, guard.value
            is_cell = isinstance(holder, types.CellType)
            if type(value) in _CONTAINERS:
                self._copies.append((guard.place.get if is_cell else None, holder, value, guard))
            elif is_cell:
                self._cells.append((holder, value, guard))
            else:
                self._entries.append((holder, guard.place.key, value, guard))
        self._autocast, self._default = _autocast(), torch.get_default_dtype()

    def __len__(self) -> int:
        compared = (self._entries, self._cells, self._copies, self._absent, self._sizes, self._keys)
        return sum(map(len, (*compared, self._numbers, self._forms, self._shared)))

    def check(self) -> None:
        """Compare all values.

        Raises `InputMismatchError`: names a value that has changed.
        """
        try:
            for index, (holder, key, value, guard) in enumerate(self._entries):
                if (now := holder[key]) is not value:
                    _compare(guard, now)
                    if _is_of_tensors(now):
                        self._entries[index] = holder, key, now, replace(guard, value=now)
            for index, (cell, value, guard) in enumerate(self._cells):
                if (now := cell.cell_contents) is not value:
                    _compare(guard, now)
                    if _is_of_tensors(now):
                        self._cells[index] = cell, now, replace(guard, value=now)
            for index, (get, holder, value, guard) in enumerate(self._copies):
                now = holder[guard.place.key] if get is None else get()
                if not _holds_the_same(now, value):
                    _compare(guard, now)
                    if _is_of_tensors(now):
                        self._copies[index] = get, holder, now, replace(guard, value=now)
            for get, length, guard in self._sizes:
                if len(now := get()) != length:
                    _refuse_length(guard, len(now))
            for get, guard in self._numbers:
                _compare_number(guard, get())
            for get, form, guard in self._forms:
                if not isinstance(now := get(), torch.Tensor) or form not in (None, _form(now)):
                    _refuse_form(guard, now)
            for get, other, guard in self._shared:
                if get() is not other():
                    _refuse_apart(guard)
            for entry in self._keys:
                get, keys, guard = entry
                if (now := tuple(get())) != keys:
                    _compare_keys(guard, now)
                    entry[1] = now
        except (LookupError, ValueError):
            _compare(guard, ABSENT)  # pyright: ignore[reportPossiblyUnboundVariable]
        for shadow, key, guard in (*self._shadowed, *self._absent):
            if key in shadow:
                _compare(guard, shadow[key])
        if self._autocast != (now := _autocast()):
            raise InputMismatchError(
                f"The step was compiled {_region(self._autocast)} and is called {_region(now)}: a "
                "compiled step computes in the types in which it was compiled. Put torch.autocast "
                "into the model or loss_fn, or compile and call in the same region."
            )
        if torch.get_default_dtype() != self._default:
            raise InputMismatchError(
                f"torch's default type was {self._default} when the step was compiled and is "
                f"{torch.get_default_dtype()} now: set it back, or compile again."
            )


_AUTOCAST = ("cpu", "cuda")


def _autocast() -> tuple[tuple[bool, torch.dtype | None], ...]:
    return tuple(map(_autocast_of, _AUTOCAST))


def _region(autocast: tuple[tuple[bool, torch.dtype | None], ...]) -> str:
    """Say in which regions of autocast a call is."""
    found = zip(_AUTOCAST, autocast, strict=True)
    inside = [f'torch.autocast("{kind}", {dtype})' for kind, (enabled, dtype) in found if enabled]
    return f"inside {' and '.join(inside)}" if inside else "outside of torch.autocast"


def _autocast_of(kind: str) -> tuple[bool, torch.dtype | None]:
    enabled = torch.is_autocast_enabled(kind)
    return enabled, torch.get_autocast_dtype(kind) if enabled else None


def _is_of_tensors(value: Any) -> bool:
    """Say whether a container holds tensors alone, so that its form is all that is compared.

    The next one is compared with it, and the one before, with its tensors, is let go of.
    """
    if not is_replaced(value):
        return isinstance(value, torch.Tensor)
    held = value.values() if isinstance(value, dict) else value
    return all(map(_is_of_tensors, held))


def _holds_the_same(now: Any, was: Any) -> bool:
    """Say whether two lists or dicts hold the very same objects; quick, and False if unsure."""
    kind = type(was)
    if type(now) is not kind or kind not in (list, dict) or len(now) != len(was):
        return False
    if kind is list:
        return all(map(is_, now, was))
    return all(map(is_, now, was)) and all(map(is_, now.values(), was.values()))


def _equal(now: Any, was: Any) -> bool:
    """Compare by value; NaN equals itself, and any tensor another: its path makes it an input."""
    if isinstance(now, torch.Tensor) and isinstance(was, torch.Tensor):
        return True
    if type(now) is not type(was):
        return False
    if isinstance(was, list | tuple):
        return len(now) == len(was) and all(map(_equal, now, was))
    if isinstance(was, dict):
        return now.keys() == was.keys() and all(_equal(now[key], was[key]) for key in was)
    if isinstance(was, np.ndarray | np.generic):
        exact = now.dtype.kind not in "fc"
        return now.dtype == was.dtype and np.array_equal(now, was, equal_nan=not exact)
    return bool(now == was or (now != now and was != was))


def _refuse_length(guard: Guard, length: int) -> None:
    raise InputMismatchError(
        f"{guard.what} had {guard.value} elements when the step was compiled and has {length} now: "
        "compile again, or take the new ones out."
    )


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)


def _refuse_form(guard: Guard, now: Any) -> None:
    was = (
        "a tensor"
        if guard.value is None
        else "a tensor of shape {} and type {}".format(*guard.value)
    )
    form = (
        "of shape {} and type {}".format(*_form(now))
        if isinstance(now, torch.Tensor)
        else repr(now)
    )
    raise InputMismatchError(
        f"{guard.what} was {was} when the step was compiled, which the code asked, and is {form} "
        "now: compile again, or put one like it there."
    )


def _refuse_apart(guard: Guard) -> None:
    raise InputMismatchError(
        f"{guard.what} was the same object as {guard.value[0]} when the step was compiled, and is "
        "another one now: let both lead to one again, or compile again."
    )


def _compare_keys(guard: Guard, now: tuple[Any, ...]) -> None:
    was = guard.value
    if guard.names:
        was, now = (tuple(key for key in keys if key in guard.names) for keys in (was, now))
    if was == now:
        return
    more, less = set(now) - set(was), set(was) - set(now)
    changes = [f"has {key!r} now, and had not" for key in sorted(more, key=str)[:3]]
    changes += [f"had {key!r}, and has not now" for key in sorted(less, key=str)[:3]]
    raise InputMismatchError(
        f"{guard.what} {', '.join(changes) or 'has another order'}, when the step was compiled: "
        "compile again, or put it back."
    )


def _compare_number(guard: Guard, now: Any) -> None:
    if guard.part == "type" and type(now).__name__ != guard.value:
        raise InputMismatchError(
            f"{guard.what}, of which the model asked the type, was of type {guard.value} when the "
            f"step was compiled and is {now!r} now: compile again, or give one of that type."
        )
    if guard.part == "number" and not isinstance(now, int | float):
        raise InputMismatchError(
            f"{guard.what} was the number {guard.value!r} when the step was compiled and is "
            f"{now!r} now: compile again, or give a number."
        )


def _compare(guard: Guard, now: Any) -> None:
    was = guard.value
    if was is ABSENT:
        raise InputMismatchError(
            f"{guard.what} was not there when the step was compiled and is {now!r} now: compile "
            "again, or take it away."
        )
    if isinstance(was, types.CodeType) and isinstance(now, types.CodeType):
        if code_facts(now) == code_facts(was):
            return
        raise InputMismatchError(
            f"{guard.what} was edited after the step was compiled, as reloading a file does: "
            "compile again."
        )
    known = is_plain(was) or type(was) in _CONTAINERS or is_replaced(was)
    if known and _equal(now, was):
        return
    if guard.place.key == "training" and isinstance(now, bool):
        mode = "train" if was else "eval"
        raise InputMismatchError(
            f"{guard.what} was in {mode}() mode when the step was compiled and is in the other one "
            f"now; call `.{mode}()` or compile again."
        )
    if known:
        found = "is gone" if now is ABSENT else f"is {now!r} now"
        remedy = "make it a tensor or a buffer" if isinstance(was, int | float) else "set it back"
        raise InputMismatchError(
            f"{guard.what} was {was!r} when the step was compiled and {found}: compile again, or "
            f"{remedy}."
        )
    raise InputMismatchError(
        f"{guard.what} was replaced by another object ({type(now).__name__}) after the step was "
        "compiled: put the old one back or compile again."
    )
