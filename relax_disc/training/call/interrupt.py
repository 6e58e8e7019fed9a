"""What may not come between: signals wait until all is written, a call from inside is refused."""

from __future__ import annotations

import contextlib
import importlib
import threading
from types import FrameType, TracebackType
from typing import Any

from relax_disc.errors import ReentrantCallError

# What `signal` wraps in conversions to enums, which take longer than all else here.
_signal: Any = importlib.import_module("_signal")


_OF_FAULTS = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"}
_KEPT = {getattr(_signal, name, None) for name in {"SIGKILL", "SIGSTOP", *_OF_FAULTS}}
_NUMBERS = tuple(sorted(set(_signal.valid_signals()) - _KEPT))


class deferred_interrupt:
    """Hold signals that Python code handles back while the block runs; deliver them afterwards.

    Ctrl-C, a cluster's SIGTERM or SIGUSR1, a time limit by SIGALRM: their handlers may raise.  Only
    the main thread receives signals; elsewhere this does nothing.
    """

    __slots__ = ("_before", "_held")

    def __enter__(self) -> None:
        self._before: list[tuple[int, Any]] = []
        if threading.current_thread() is not threading.main_thread():
            return
        self._held: dict[int, FrameType | None] = {}
        for number in _NUMBERS:
            handler = _signal.getsignal(number)  # None: installed by C code, and no number of ours
            if callable(handler):
                self._before.append((number, handler))
                _signal.signal(number, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.setdefault(number, frame)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._before:
            return
        for number, handler in self._before:
            _signal.signal(number, handler)
        if self._held:
            handlers = dict(self._before)
            with contextlib.ExitStack() as stack:  # each is called, though one before it raises
                for number, frame in reversed(self._held.items()):
                    stack.callback(handlers[number], number, frame)


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
