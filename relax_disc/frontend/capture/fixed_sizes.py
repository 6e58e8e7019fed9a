"""Find the lines of a model that fix a dim to the size of the example while it is exported.

``for i in range(x.shape[1])`` is such a line: it runs as often as the example is long.  Later
torch.export says which dim is fixed; the line is seen here only, in the moment when it happens.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from relax_disc.frontend.capture.source_lines import SourceLine, parse_stack

_WRAPPER = "frontend/capture/export.py"


@contextlib.contextmanager
def lines_that_fix_sizes() -> Iterator[list[SourceLine]]:
    """Collect, in the list that is yielded, the lines at which a symbol became a number."""
    found: dict[SourceLine, None] = {}
    lines: list[SourceLine] = []
    environment: Any = ShapeEnv
    before = environment._set_replacement

    def noting(self: Any, symbol: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(value, "is_number", False):
            # What called the capture lies above the wrapped model's frame and is no line of it.
            _, _, inside = "".join(traceback.format_stack()).rpartition(_WRAPPER)
            line = parse_stack(inside)
            if line.file and line not in found:
                found[line] = None
                lines.append(line)
        return before(self, symbol, value, *args, **kwargs)

    environment._set_replacement = noting
    try:
        yield lines
    finally:
        environment._set_replacement = before


def places(lines: Sequence[SourceLine]) -> str:
    """Word such lines as a remark in an error's message; empty where there are none."""
    listed = ", ".join(str(line) for line in lines[:4])
    return f" (sizes become fixed numbers at {listed})" if lines else ""
