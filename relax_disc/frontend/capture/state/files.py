"""Files that the user's code reads while a step is traced."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from relax_disc.frontend.capture.source_lines import users_line
from relax_disc.frontend.capture.state.outer import Guard
from relax_disc.frontend.capture.state.sources import FILES, STATES, Place

_OF_THE_SOURCE = {"importlib", "inspect", "linecache", "logging", "tokenize", "traceback"}
_THROUGH = {"numpy", *sys.stdlib_module_names} - _OF_THE_SOURCE - {"warnings"}
"""Modules that read a file in the name of who calls them; others read the program's own source."""


@contextlib.contextmanager
def watched_files(reads: dict[str, str]) -> Iterator[None]:
    """Note the files that the user's code opens to read and the folders that it lists.

    In this thread. ``reads``: their states by their paths.
    """
    thread = threading.get_ident()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any = ".", *args: Any, **named: Any) -> Any:
            mode = named.get("mode", args[0] if args else "r")
            is_read = not isinstance(mode, str) or not set("wax+").intersection(mode)
            is_path = isinstance(path, str | bytes | os.PathLike)
            if is_path and is_read and threading.get_ident() == thread:
                if users_line(_THROUGH) is not None:
                    known = str(Path(os.fsdecode(path)).absolute())
                    reads.setdefault(known, STATES[known])
            return function(path, *args, **named)

        return look

    places = [(builtins, "open"), (io, "open"), (os, "listdir"), (os, "scandir")]
    with contextlib.ExitStack() as stack:
        for place, name in places:
            stack.enter_context(patch.object(place, name, watched(getattr(place, name))))
        yield


def guards_of_files(reads: dict[str, str]) -> Iterator[Guard]:
    """List what must stay as it was read."""
    for path, state in reads.items():
        yield Guard(path, FILES.to("item", path), Place(STATES, path), state)
