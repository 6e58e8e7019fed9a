"""Attributes that the steps of a loop set: a state that a cell keeps, or weights to be shown.

One that each step sets before it reads it is the last step's afterwards.  One that is read first
is carried from step to step, as a variable is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from relax_disc.frontend.capture.loops.recorded import ReadsBeforeItSets, RecordedLoops

_UNREAD = object()  # what an attribute holds until a step has set it


@dataclass(frozen=True, slots=True)
class StepAttribute:
    """An attribute; ``text``: its own name for messages, no other's."""

    holder: Any
    name: str
    text: str

    @property
    def key(self) -> tuple[int, str]:
        """Name it by the ``id`` of its object and its own name."""
        return id(self.holder), self.name

    def get(self, default: Any) -> Any:
        """Return what it holds; ``default``: where it is not there, or no step has set it."""
        value = vars(self.holder).get(self.name, default)
        return default if value is _UNREAD else value

    def set(self, value: Any) -> None:
        """Let it hold a value."""
        vars(self.holder)[self.name] = value

    def hide(self) -> None:
        """Let it hold what no one may read, until a step sets it."""
        self.set(_UNREAD)


def watch_reads(loops: RecordedLoops, attributes: Iterable[StepAttribute]) -> None:
    """Until the step ends note in ``loops`` which of the attributes it reads before it sets them.

    To read one raises `ReadsBeforeItSets`.
    """
    for kind in dict.fromkeys(type(each.holder) for each in attributes):
        watching = patch.object(kind, "__getattribute__", _watching(kind, loops))
        loops.watching.enter_context(watching)


def _watching(kind: type, loops: RecordedLoops) -> Any:
    read: Any = kind.__getattribute__

    def getattribute(of: Any, name: str) -> Any:
        value = read(of, name)
        if value is _UNREAD:
            loops.carried.add((id(of), name))
            raise ReadsBeforeItSets(f"{type(of).__name__}.{name} is read before a step sets it")
        return value

    return getattribute
