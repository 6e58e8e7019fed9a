"""Find the line of the user's model that an operator of a traced graph stems from."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)')
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


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


def calling_line() -> SourceLine:
    """Return the innermost line outside PyTorch and this package that is being run."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _PACKAGE)):
        frame = frame.f_back
    return (
        SourceLine("", 0) if frame is None else SourceLine(frame.f_code.co_filename, frame.f_lineno)
    )


@functools.lru_cache(maxsize=4096)
def parse_stack(text: str) -> SourceLine:
    """Return the innermost frame of a formatted stack that belongs to the model."""
    for frame in reversed(list(_FRAME.finditer(text))):
        if not frame["file"].startswith((_TORCH, _PACKAGE)):
            return SourceLine(frame["file"], int(frame["line"]))
    return SourceLine("", 0)
