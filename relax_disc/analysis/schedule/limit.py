"""How much a search may do: counted work, so that results repeat, and time as a last resort."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class WorkLimit:
    """Work that is left, and when time is up.

    Attributes
    ----------
    left : int
        Arcs that may still be looked at.
    deadline : float
        In the time of `time.monotonic`.
    timed_out : bool
        Whether the deadline was met.
    """

    left: int
    deadline: float
    timed_out: bool = False

    def exhausted(self) -> bool:
        """Whether to stop."""
        if self.left <= 0:
            return True
        self.timed_out = self.timed_out or time.monotonic() > self.deadline
        return self.timed_out

    def spend(self, work: int) -> bool:
        """Count work that was done; return whether the limit is exhausted."""
        self.left -= work
        return self.exhausted()

    @contextmanager
    def grant(self, share: int) -> Iterator[None]:
        """Leave 1/share of the work inside."""
        granted = max(self.left, 0) // share
        saved = self.left - granted
        self.left = granted
        yield
        self.left += saved
