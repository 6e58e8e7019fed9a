"""What may not come between: Ctrl-C waits until all is written, a call from inside is refused."""

from __future__ import annotations

import importlib
import threading
from types import FrameType, TracebackType
from typing import Any

from relax_disc.errors import ReentrantCallError

# What `signal` wraps in conversions to enums, which take longer than all else here.
_signal: Any = importlib.import_module("_signal")


class deferred_interrupt:
    """Hold SIGINT back while the block runs and deliver it afterwards.

    Only the main thread receives signals; elsewhere this does nothing.
    """

    __slots__ = ("_held", "_previous")

    def __enter__(self) -> None:
        self._previous: Any = None
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = _signal.getsignal(_signal.SIGINT)
        if self._previous is None:  # installed by C code, which would not be restored
            return
        self._held: list[tuple[int, FrameType | None]] = []
        _signal.signal(_signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is None:
            return
        _signal.signal(_signal.SIGINT, self._previous)
        if self._held and callable(self._previous):
            self._previous(*self._held[-1])


class OneAtATime:
    """Context of one call; the caller holds a lock that keeps other threads out.

    Raises `ReentrantCallError`: on entry, if the context is entered already: a signal handler, a
    finalizer or a kernel called.
    """

    def __init__(self) -> None:
        self._is_entered = False

    def __enter__(self) -> None:
        if self._is_entered:
            raise ReentrantCallError(
                "This function is running already, in the same thread: a signal handler, a "
                "finalizer or a kernel called it. Let that call end first."
            )
        self._is_entered = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_entered = False
