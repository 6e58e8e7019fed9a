"""Tell the sizes that a model's own code compares from those that PyTorch compares inside.

Exported at one size, ``if x.shape[1] == 12`` takes one branch for good: the program is wrong at 12,
and the condition ``m != 12`` must hold. PyTorch compares sizes as well, to see whether the slice
``mask[:m, :m]`` of a table of 12 columns is contiguous; there "not equal" is the general way, which
is right for equal sizes too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sympy
import torch

from relax_disc.frontend.capture.source_lines import SourceLine

_UNKNOWN = SourceLine("", 0)
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class SizeBranches:
    """The equalities of sizes on which a model's own code branched."""

    def __init__(self) -> None:
        self._differences: dict[Any, SourceLine] = {}

    def add(self, condition: Any, line: SourceLine) -> None:
        """Note a condition, whether it held or not, and the line that asked."""
        for equality in condition.atoms(sympy.Eq, sympy.Ne):
            self._differences.setdefault(_difference(equality), line)

    def line(self, condition: Any) -> SourceLine:
        """Return the line that asked for a condition; one without a file where none is known."""
        found = (_difference(e) for e in condition.atoms(sympy.Eq, sympy.Ne))
        return next((self._differences[d] for d in found if d in self._differences), _UNKNOWN)

    def decides(self, condition: Any) -> bool:
        """Whether a condition must hold: all but inequalities that PyTorch alone looked at.

        Sizes of 1 must not be mistaken in any case, since they broadcast.
        """
        if not isinstance(condition, sympy.Ne) or 1 in condition.args:
            return True
        return _difference(condition) in self._differences


def _difference(equality: Any) -> Any:
    """Bring an equality into a form that does not depend on how it was written."""
    left, right = equality.args
    _, difference = sympy.expand(left - right).primitive()
    return -difference if difference.could_extract_minus_sign() else difference


@contextlib.contextmanager
def size_branches() -> Iterator[SizeBranches]:
    """Collect the equalities that code outside PyTorch asks for while this is active."""
    found = SizeBranches()
    before = torch.SymBool.__bool__

    def noting(self: Any) -> bool:
        frame = sys._getframe(1)
        caller = frame.f_code.co_filename
        if not caller.startswith(_INSIDE) and isinstance(self.node.expr, sympy.Basic):
            found.add(self.node.expr, SourceLine(caller, frame.f_lineno))
        return before(self)

    torch.SymBool.__bool__ = noting
    try:
        yield found
    finally:
        torch.SymBool.__bool__ = before
