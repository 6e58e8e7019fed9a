"""Whether what is asked of the device now is captured, to be replayed later.

What a library function reads on the host while a CUDA graph is captured stays as it was in every
replay, so a function that depends on such a value refuses instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


class NotCapturableError(RuntimeError):
    """What a call does cannot be replayed; says why.  Never reaches the user."""


@contextmanager
def capturing() -> Iterator[None]:
    """Inside, functions that cannot be captured refuse."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


def is_capturing() -> bool:
    """Whether the device's work is captured now."""
    return _capturing.get()


def refuse_capture(reason: str) -> None:
    """Refuse to be captured; ``reason``: what is read on the host."""
    if _capturing.get():
        raise NotCapturableError(reason)
