"""What an export has met of loops over dynamic lengths, and what it knows of the lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from relax_disc.errors import ShapeRangeError
from relax_disc.frontend.capture.source_lines import SourceLine


class LoopRefusal(Exception):
    """Why a loop cannot be run as one step; the message names its line."""


class OtherLoops(LoopRefusal):
    """A loop over a tensor is met in code that is not prepared for it."""


class FirstStepDiffers(LoopRefusal):
    """What a loop carries is something else before its first step than before the others."""


class LastStepDiffers(LoopRefusal):
    """The last step differs from the others, as where it reads a shorter part."""


class LongerExample(ShapeRangeError):
    """A size that follows from those of the example is 0 or 1 there; at ``fails_at`` it is more."""


class ReadsBeforeItSets(LoopRefusal):
    """A step reads an attribute that the step before has set."""


class RecordedLoops:
    """The loops that an export has met: their lines, and why others were left alone."""

    def __init__(
        self, dims: Mapping[str, Any], apart: dict[SourceLine, str], may_grow: bool
    ) -> None:
        self.dims = dims  # that are declared, by the sources of their symbols
        self.may_grow = may_grow  # whether another example may be asked for
        self.apart = apart  # which step of a loop is recorded by itself: "first" or "last"
        self.lines: list[SourceLine] = []
        self.reasons: list[str] = []
        self.inside: SourceLine | None = None  # of the loop whose step is being recorded
        self.step: Any = None  # the number of that step, and of how many
        self.count: Any = None
        self.checks: list[tuple[Tensor, str]] = []  # that it makes of data, with their messages
        self.may_be_empty: list[bool] = []  # whether a loop has no step at some length
        self.is_off = False
        self.are_all = False  # whether loops over tensors are prepared, beside those over ranges
        self.modules: list[nn.Module] = []
        # attributes, by the ``id`` of their object and their name, that carry a value to the next
        # step, and what watches who reads the others
        self.carried: set[tuple[int, str]] = set()
        self.watching = contextlib.ExitStack()

    def give_up(self, error: Exception) -> bool:
        """Whether to export once more, with more loops prepared or each as it is written."""
        if isinstance(error, OtherLoops):
            self.are_all = True
            return True
        if isinstance(error, ReadsBeforeItSets) or self._takes_a_step_apart(error):
            return True
        is_refusal = isinstance(error, LoopRefusal)
        if self.is_off or not (self.lines or self.are_all or is_refusal):
            return False
        why = str(error).strip().partition("\n")[0].rstrip(".")
        if self.lines and not is_refusal:
            why = f"the loop at {self.lines[-1]} cannot be run as one step: {why}"
        if self.lines or not isinstance(error, ShapeRangeError):  # else the same again
            self.reasons.append(why)
        self.is_off = True
        return True

    def _takes_a_step_apart(self, error: Exception) -> bool:
        """Whether to record the first step of a loop by itself, and if that fails the last one."""
        if self.inside is None:
            return False
        branches = isinstance(error.__cause__, GuardOnDataDependentSymNode)
        tried = self.apart.get(self.inside)
        if tried is None and (branches or isinstance(error, FirstStepDiffers)):
            self.apart[self.inside] = "first"
        elif (tried == "first" and branches) or (
            tried is None and isinstance(error, LastStepDiffers)
        ):
            self.apart[self.inside] = "last"
        else:
            return False
        return True

    def explained(self, error: Exception) -> Exception:
        """Add to an error why a loop over a length was left alone."""
        if self.reasons and isinstance(error, ShapeRangeError):
            explained = ShapeRangeError("; ".join([str(error), *dict.fromkeys(self.reasons)]))
            vars(explained).update(vars(error))
            return explained
        return error


_ACTIVE: list[RecordedLoops] = []


@contextlib.contextmanager
def recorded_loops(loops: RecordedLoops) -> Iterator[None]:
    """Record loops over dynamic lengths while this is active."""
    loops.lines.clear()
    loops.may_be_empty.clear()
    loops.inside = None
    _ACTIVE.append(loops)
    try:
        yield
    finally:
        loops.watching.close()
        _ACTIVE.pop()


def set_modules(modules: list[nn.Module]) -> None:
    """Say which modules a loop's body must leave as they are."""
    if _ACTIVE:
        _ACTIVE[-1].modules = modules


def known_modules() -> list[nn.Module]:
    """Return those that `set_modules` was given."""
    return _ACTIVE[-1].modules if _ACTIVE else []


def note_unread(name: str) -> None:
    """Remember a function whose loops stay as they are, because its source is nowhere."""
    if _ACTIVE:
        _ACTIVE[-1].reasons.append(
            f"the source of {name} cannot be read (exec, python -c and standard input keep none), "
            "so no loop in it can be run as one step: put it into a file"
        )


def are_all_prepared() -> bool:
    """Whether to prepare each loop, beside those of functions that name ``range``."""
    return bool(_ACTIVE) and _ACTIVE[-1].are_all


def active() -> RecordedLoops | None:
    """Return those of the export that goes on; None where none does, or loops stay as written."""
    return _ACTIVE[-1] if _ACTIVE and not _ACTIVE[-1].is_off else None
