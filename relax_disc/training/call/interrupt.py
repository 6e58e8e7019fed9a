"""What may not come between: Ctrl-C waits until all is written, a call from inside is refused."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

from relax_disc.errors import ReentrantCallError


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold SIGINT back while the block runs and deliver it afterwards.

    Only the main thread receives signals; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous is None:  # installed by C code, which would not be restored
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held and callable(previous):
            previous(*held[-1])


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
