"""The next multiple of a number, written by code that runs where a size is none.

``if length % 8: y = pad(y, 8 - length % 8)`` pads by the remainder that is left, which at a
multiple would be 8.  Exported for the other sizes alone, ``(8 - length % 8) % 8`` is the same
number; and at multiples it is 0, so that the program is right there as well.  So it is with
``length // 8 + 1``, which is then ``(length + 7) // 8``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch.utils._sympy import functions as torch_sympy

from relax_disc.frontend.capture.sizes.evaluation import REMAINDERS
from relax_disc.frontend.capture.sizes.exact import size_of
from relax_disc.frontend.capture.sizes.ways import Ways


@contextlib.contextmanager
def general_next_multiples(ways: Ways) -> Iterator[None]:
    """Write such numbers in the general form while this is active.

    ``ways``: knows the sizes for which the model is exported.
    """
    subtracted_from, subtracted = torch.SymInt.__rsub__, torch.SymInt.__sub__
    added, divided = torch.SymInt.__add__, torch.SymInt.__mod__

    def rsub(size: torch.SymInt, number: Any) -> Any:
        missing = subtracted_from(size, number)
        remainder = _expression(size)
        if not isinstance(remainder, REMAINDERS) or remainder.args[1] != number:
            return missing
        return missing % number if ways.is_never_zero(remainder, size.node.shape_env) else missing

    def sub(size: torch.SymInt, other: Any) -> Any:
        remainder = _expression(other) if isinstance(other, torch.SymInt) else None
        if isinstance(remainder, REMAINDERS):  # length + 8 - length % 8
            number = remainder.args[1]
            more, _ = sympy.expand(_expression(size)).as_coeff_Add()
            if number.is_Integer and more >= number:
                return subtracted(size, int(number)) + rsub(other, int(number))
        return ways.clamped(subtracted(size, other))

    def add(size: torch.SymInt, number: Any) -> Any:
        quotient = _expression(size)
        is_next = isinstance(number, int) and number == 1
        if not is_next or not isinstance(quotient, torch_sympy.FloorDiv):
            return added(size, number)
        above, below = quotient.args
        env = size.node.shape_env
        if not below.is_Integer or not ways.is_never_zero(torch_sympy.Mod(above, below), env):
            return added(size, number)
        upper = torch_sympy.FloorDiv(above + below - 1, below)
        return size_of(upper, env)

    def mod(size: torch.SymInt, number: Any) -> Any:
        remainder = _expression(size)
        is_done = isinstance(remainder, REMAINDERS) and remainder.args[1] == number
        return size if is_done else divided(size, number)

    with (
        patch.object(torch.SymInt, "__rsub__", rsub),
        patch.object(torch.SymInt, "__sub__", sub),
        patch.object(torch.SymInt, "__mod__", mod),
        patch.object(torch.SymInt, "__add__", add),
        patch.object(torch.SymInt, "__radd__", add),
    ):
        yield


def _expression(size: torch.SymInt) -> Any:
    return size.node.expr
