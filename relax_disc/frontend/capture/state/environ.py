"""Variables of the environment that the user's code reads while a step is traced."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from relax_disc.frontend.capture.source_lines import users_line
from relax_disc.frontend.capture.state.outer import ABSENT, Guard
from relax_disc.frontend.capture.state.sources import ENVIRON, Place

_THROUGH = ("os", "_collections_abc", "collections")


@contextlib.contextmanager
def watched_environ(reads: dict[str | None, Any]) -> Iterator[None]:
    """Note what is read of ``os.environ`` by the user's code, in this thread.

    ``reads``: values or `ABSENT` by their names; under None all names, where it goes through them.
    """
    kind, thread = type(os.environ), threading.get_ident()
    getter, iterator = kind.__getitem__, kind.__iter__

    def is_asked_by_user(environ: Any) -> bool:
        here = environ is os.environ and threading.get_ident() == thread
        return here and users_line(_THROUGH) is not None

    def read(self: Any, key: Any) -> Any:
        value: Any = ABSENT
        try:
            value = getter(self, key)
            return value
        finally:
            if isinstance(key, str) and is_asked_by_user(self):
                reads.setdefault(key, value)

    def names(self: Any) -> Iterator[str]:
        if is_asked_by_user(self):
            reads.setdefault(None, tuple(iterator(self)))
        return iterator(self)

    with patch.object(kind, "__getitem__", read), patch.object(kind, "__iter__", names):
        yield


def guards_of_environ(reads: dict[str | None, Any]) -> Iterator[Guard]:
    """List what must stay as it was read."""
    for key, value in reads.items():
        if key is None:
            yield Guard(str(ENVIRON), ENVIRON, Place([os.environ], 0), value, part="keys")
            continue
        source = ENVIRON.to("item", key)
        yield Guard(str(source), source, Place(os.environ, key), value)
