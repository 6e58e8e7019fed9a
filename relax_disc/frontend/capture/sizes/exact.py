"""Sizes and the example's numbers: each made of the other.

Which floats made of sizes are fractions of them, so that rounding one is a division.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import sympy
import torch
from torch.utils._sympy import functions as torch_sympy

from relax_disc.frontend.capture.sizes.evaluation import MOST_POINTS, evaluate

_MOST_DIVISOR = 64
"""A size times such a fraction is exact in floating point, or far enough from an integer."""

_MOST_DENOMINATOR = 1000
"""Of a decimal such as 0.7 or 0.125, which no float is."""


def example_size(size: int | torch.SymInt) -> int | None:
    """Return a size of the example, which asks PyTorch nothing; None of one that data tell."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)


def size_of(expr: Any, environment: Any) -> torch.SymInt:
    """Make the size that an expression of PyTorch's symbols tells."""
    return environment.create_symintnode(expr, hint=int(environment.guarding_hint_or_throw(expr)))


def fraction_of(expr: Any) -> tuple[Any, int] | None:
    """Write an expression as an integer one above a small number; None where it is no such thing.

    A float of the model counts as the fraction that it is nearest to by its bits: 0.5, not 0.1.
    """
    exact = expr.replace(torch_sympy.ToFloat, lambda x: x)
    exact = exact.xreplace({f: sympy.Rational(f) for f in exact.atoms(sympy.Float)})
    for quotient in (torch_sympy.IntTrueDiv, torch_sympy.FloatTrueDiv):
        exact = exact.replace(quotient, lambda x, y: x / y)
    above, below = sympy.fraction(sympy.together(exact))
    if not above.is_integer or not below.is_Integer or int(below) > _MOST_DIVISOR:
        return None
    return sympy.expand(above), int(below)


def rounded_multiple(
    expr: Any,
    most: Any,
    rounded: Callable[[Any, int], sympy.Expr],
    of_floats: Callable[[np.ndarray], np.ndarray],
) -> Any:
    """Write a rounded multiple of a size, such as 0.7 of it, in integers; None where none is exact.

    By the decimal fraction next to the float, tried at all sizes: 0.7 times 90 is less than 63 to
    the processor.

    ``most``: upper bound of ``expr``. ``rounded``: rounds a fraction in integers; ``of_floats``:
    rounds floats.
    """
    factor, rest = expr.as_coeff_Mul()
    if (
        not isinstance(factor, sympy.Float)
        or factor <= 0
        or not isinstance(rest, torch_sympy.ToFloat)
    ):
        return None
    if not sympy.sympify(most).is_number or not most <= MOST_POINTS * factor:
        return None
    (size,) = rest.args
    near = Fraction(float(factor)).limit_denominator(_MOST_DENOMINATOR)
    any_size = sympy.Symbol("size", integer=True, positive=True)
    sizes = np.arange(1, round(float(most / factor)) + 1)
    written = evaluate(rounded(near.numerator * any_size, near.denominator), {any_size: sizes})
    if not np.array_equal(written, of_floats(float(factor) * sizes)):
        return None
    return sympy.expand(rounded(near.numerator * size, near.denominator))
