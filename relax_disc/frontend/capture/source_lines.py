"""Find the line of the user's model that an operator of a traced graph stems from."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import traceback
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)')
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])
_STANDARD = str(Path(contextlib.__file__).parent)
_ENTRY = str(Path(__file__).parent / "exported" / "export.py")  # calls the user's functions


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a file; ``file`` is empty where the trace knows none."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "the model"


def source_line(node: fx.Node) -> SourceLine:
    """Return the innermost line outside PyTorch and this package that called ``node``."""
    return parse_stack(node.meta.get("stack_trace") or "")


def at_line(node: fx.Node) -> str:
    """Return ``" at file:line"`` for the end of a message; nothing where the trace knows none."""
    line = source_line(node)
    return f" at {line}" if line.file else ""


def users_frames(summary: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames of the model and of ``loss_fn`` that run inside an export, outermost first.

    What calls ``compile`` is not among them.
    """
    found: list[traceback.FrameSummary] = []
    for frame in reversed(summary):
        if is_entry(frame.name, frame.filename):
            return found[::-1]
        if not frame.filename.startswith((_TORCH, _PACKAGE)):
            found.append(frame)
    return []


def is_entry(name: str, file: str) -> bool:
    """Say whether a function, and its file, are what calls the user's functions for an export."""
    return (name, file) == ("forward", _ENTRY)


def calling_line() -> SourceLine:
    """Return the innermost line outside PyTorch and this package that is being run."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _PACKAGE)):
        frame = frame.f_back
    return (
        SourceLine("", 0) if frame is None else SourceLine(frame.f_code.co_filename, frame.f_lineno)
    )


def users_line(through: Container[str] = ()) -> SourceLine | None:
    """Return the line of the user's code that is being run, None where another's asks.

    ``through``: top names of modules to look past. Others than the user are PyTorch, Python's own
    library and what is installed.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and _top(frame.f_globals) not in through:
            return None if _is_of_others(file) else SourceLine(file, frame.f_lineno)
        frame = frame.f_back
    return None


def _top(namespace: dict[str, Any]) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]


@functools.cache
def _is_of_others(file: str) -> bool:
    return file.startswith((_TORCH, _STANDARD, "<frozen")) or is_installed(file)


def is_models(file: str) -> bool:
    """Say whether a file is neither PyTorch's, nor this package's, nor Python's own."""
    if file.startswith((_TORCH, _PACKAGE, "<frozen")):  # which may be installed
        return False
    return is_installed(file) or not file.startswith(_STANDARD)


def is_installed(file: str) -> bool:
    """Say whether a file is one of an installed library."""
    return any(f"/{name}-packages/" in file for name in ("site", "dist"))


_ASKING = ("sym_node.py", "symbolic_shapes.py", "recording.py", "_stats.py", "torch/__init__.py")
"""Ends of the names of PyTorch's files that lie between a question and the code that asks."""


def asks_by_itself(frame: Any) -> bool:
    """Say whether code outside PyTorch asks for a condition, not an operator that it calls.

    ``frame``: where PyTorch decides it.
    """
    while frame is not None and frame.f_code.co_filename.endswith(_ASKING):
        frame = _above_package(frame.f_back)
    return frame is not None and not frame.f_code.co_filename.startswith((_TORCH, _PACKAGE))


def _above_package(frame: Any) -> Any:
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def callers_depth() -> int:
    """Return the ``stacklevel`` of a warning that shall name the line that called this package."""
    depth, frame = 1, sys._getframe(1)
    inside = (_TORCH, _PACKAGE, contextlib.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        depth, frame = depth + 1, frame.f_back
    return depth


@functools.lru_cache(maxsize=4096)
def parse_stack(text: str) -> SourceLine:
    """Return the innermost frame of a formatted stack that belongs to the model."""
    for frame in reversed(list(_FRAME.finditer(text))):
        if not frame["file"].startswith((_TORCH, _PACKAGE)):
            return SourceLine(frame["file"], int(frame["line"]))
    return SourceLine("", 0)
