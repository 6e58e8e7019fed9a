"""Objects that another read finds changed: iterators, generators, queues, clocks.

While a model is exported a `StandIn` lies in the place of each that the model or the loss function
reaches.  Their code may hold it and pass it on; to take the next value is refused, because the
program would repeat that one forever, and to ask a clock is told.  What an installed library takes
by itself is its own affair.
"""

from __future__ import annotations

import contextlib
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn
from unittest.mock import patch

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.source_lines import SourceLine, users_line
from relax_disc.frontend.capture.state.kinds import CLOCKS, FOREIGN, moved_by
from relax_disc.frontend.capture.state.reachable import Reachable
from relax_disc.frontend.capture.state.sources import AttributesOf, DefaultsOf, Place, Source


class StandIn:
    """An object of which some members are told to ``ask`` when the thread that made this uses them.

    All else is the object's own, and all from `release` on.
    """

    __slots__ = ("_ask", "_moved_by", "_thread", "original")

    def __init__(self, original: Any, ask: Callable[[str], None]) -> None:
        self.original, self._ask = original, ask
        self._moved_by, self._thread = moved_by(original), threading.get_ident()

    def release(self) -> None:
        """Be the object alone: the user's code may have kept this."""
        self._moved_by = frozenset()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What ``isinstance`` sees."""
        return type(self.original)

    def _member(self, name: str) -> Any:
        member = getattr(self.original, name)
        if name not in self._moved_by or threading.get_ident() != self._thread:
            return member
        if moved_by(member) and "__next__" not in self._moved_by:  # a class in a module
            return StandIn(member, lambda inner: self._ask(f"{name}.{inner}"))
        self._ask(name)
        return member

    def __getattr__(self, name: str) -> Any:
        return self._member(name)

    def __iter__(self) -> StandIn:
        return self

    def __next__(self) -> Any:
        return self._member("__next__")()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call a clock, or what takes the next value."""
        return self._member("__call__")(*args, **kwargs)

    def __bool__(self) -> bool:
        return bool(self.original)

    def __len__(self) -> int:
        return len(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self.original)

    def __subclasscheck__(self, kind: Any) -> bool:
        return issubclass(kind, self.original)


def original_of(value: Any) -> Any:
    """Return what a stand-in stands for; any other object itself."""
    return value.original if type(value) is StandIn else value


@contextlib.contextmanager
def refused_moves(known: Reachable, tell: Callable[[str, SourceLine], None]) -> Iterator[None]:
    """Put stand-ins into the places of what moves; ``tell`` gets the clocks that are asked.

    Raises `UnsupportedOperatorError`: the next value of something is taken.
    """
    stand_ins: list[StandIn] = []
    stood: list[tuple[Place, Any, Any]] = []
    changed: dict[int, list[Any]] = {}  # parts of tuples, by the ``id`` of what they were
    try:
        with _module_clocks(tell):
            for source, place, value in known.moving:
                if not moved_by(value):
                    continue
                stand_ins.append(StandIn(value, _asked(source, value, tell)))
                place, new = _outside_tuples(place, stand_ins[-1], known.tuples, changed)
                if place.is_writable or isinstance(place.container, AttributesOf | DefaultsOf):
                    with contextlib.suppress(AttributeError, TypeError):  # read only
                        before = place.get()
                        place.put(new)
                        stood.append((place, before, new))
            yield
    finally:
        for stand_in in stand_ins:
            stand_in.release()
        for place, before, new in reversed(stood):
            with contextlib.suppress(LookupError, ValueError):
                if place.get() is new:
                    place.put(before)


def _outside_tuples(
    place: Place, new: Any, tuples: Mapping[int, Place], changed: dict[int, list[Any]]
) -> tuple[Place, Any]:
    """Return what to put where, so that a place inside a tuple holds another object."""
    while isinstance(holder := place.container, tuple) and id(holder) in tuples:
        parts = changed.setdefault(id(holder), list(holder))
        parts[place.key] = new
        new = tuple(parts) if type(holder) is tuple else getattr(holder, "_make", tuple)(parts)
        place = tuples[id(holder)]
    return place, new


def _asked(
    source: Source, value: Any, tell: Callable[[str, SourceLine], None]
) -> Callable[[str], None]:
    """Make what a stand-in calls when it is moved on."""
    is_clock = moved_by(value) & {"now", "datetime"} or getattr(value, "__self__", None) is time

    def ask(name: str) -> None:
        line = users_line(() if is_clock else FOREIGN)
        if line is None:
            return
        if is_clock:
            tell(str(source) if name == "__call__" else f"{source}.{name}", line)
        else:
            _refuse(source, value, line)

    return ask


def _refuse(source: Source, value: Any, line: SourceLine) -> NoReturn:
    kind = type(getattr(value, "__self__", value))
    if kind is threading.Event:
        raise UnsupportedOperatorError(
            f"{line}: the model or loss_fn asks {source} (an Event), which other threads set; a "
            "compiled step would repeat that one answer forever. Ask in your loop and give the "
            "answer to the step as a tensor of the batch.",
            ((kind.__qualname__, str(line)),),
        )
    raise UnsupportedOperatorError(
        f"{line}: the model or loss_fn takes the next value of {source} (a {kind.__qualname__}), "
        "which was made before the step; a compiled step would repeat that one value forever. Take "
        "it in your loop and give it to the step as an argument.",
        ((kind.__qualname__, str(line)),),
    )


@contextlib.contextmanager
def _module_clocks(tell: Callable[[str, SourceLine], None]) -> Iterator[None]:
    """Watch the functions of the module `time`, which the user's code may import at any place."""
    thread = threading.get_ident()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def clock(*args: Any) -> Any:
            if not args and threading.get_ident() == thread:
                line = users_line()
                if line is not None:
                    tell(f"time.{name}", line)
            return function(*args)

        return clock

    with contextlib.ExitStack() as stack:
        for name in CLOCKS:
            function: types.BuiltinFunctionType = getattr(time, name)
            stack.enter_context(patch.object(time, name, watched(name, function)))
        yield
