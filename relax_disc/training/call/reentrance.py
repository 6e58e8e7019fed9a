"""Refuse a call of a compiled function from inside another one in the same thread."""

from __future__ import annotations

from types import TracebackType

from relax_disc.errors import ReentrantCallError


class OneAtATime:
    """Context of one call; the caller holds a lock that keeps other threads out.

    Raises
    ------
    ReentrantCallError
        On entry, if the context is entered already: a signal handler, a finalizer or a kernel
        called.
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
