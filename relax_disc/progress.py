"""What takes long tells its name: phases of capture, compilation and calibration.

>>> with relax_disc.progress.watching(lambda phase, seconds: print(phase, seconds)):
...     step = relax_disc.compile(...)

Nothing is printed here; the command ``relax-disc`` shows phases on a terminal.  Each is also logged
(``INFO``) when it ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Watcher = Callable[[str, "float | None"], None]
"""Called with a phase's name and None when it begins, and with its seconds when it ends."""

_logger = logging.getLogger(__name__)
_watchers: list[Watcher] = []


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
