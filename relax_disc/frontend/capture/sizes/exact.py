"""Which floats made of sizes are fractions of them, so that rounding one is a division."""

from __future__ import annotations

from typing import Any

import sympy
from torch.utils._sympy import functions as torch_sympy

_MOST_DIVISOR = 64
"""A size times such a fraction is exact in floating point, or far enough from an integer."""


def fraction_of(expr: Any) -> tuple[Any, int] | None:
    """Write an expression as an integer one above a small number; None where it is no such thing.

    A float of the model counts as the fraction that it is nearest to by its bits: 0.5, not 0.1.
    """
    exact = expr.replace(torch_sympy.ToFloat, lambda x: x)
    exact = exact.replace(torch_sympy.IntTrueDiv, lambda x, y: x / y)
    exact = exact.xreplace({f: sympy.Rational(f) for f in exact.atoms(sympy.Float)})
    above, below = sympy.fraction(sympy.together(exact))
    if not below.is_Integer or int(below) > _MOST_DIVISOR:
        return None
    return sympy.expand(above), int(below)
