"""What takes long tells its name: phases of capture, compilation and calibration.

>>> with relax_disc.progress.watching(lambda phase, seconds: print(phase, seconds)):
...     step = relax_disc.compile(...)

On a terminal phases are shown on stderr while they last, unless somebody watches; elsewhere nothing
is printed.  Each is also logged (``INFO``) when it ends.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

Watcher = Callable[[str, "float | None"], None]
"""Called with a phase's name and None when it begins, and with its seconds when it ends."""

_logger = logging.getLogger(__name__)
_watchers: list[Watcher] = []

_LONG_SECONDS = 2.0
"""A phase that took longer leaves a line behind."""


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` at the begin and the end of each phase inside the block, from any thread."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what the block does; it ends for the watchers when it raises, too."""
    with contextlib.nullcontext() if _watchers else shown():
        begin = time.perf_counter()
        for watcher in tuple(_watchers):
            watcher(name, None)
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            _logger.info("%s: %.1f s", name, seconds)
            for watcher in tuple(_watchers):
                watcher(name, seconds)


@contextmanager
def shown() -> Iterator[None]:
    """Show on a terminal what takes long; nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status("") as status:
        running: list[str] = []

        def tell(name: str, seconds: float | None) -> None:
            if seconds is None:
                running.append(name)
            else:
                running.remove(name)
                if seconds > _LONG_SECONDS:
                    console.print(f"[dim]{name}: {seconds:.1f} s[/dim]")
            status.update(running[-1] if running else "")

        with watching(tell):
            yield
