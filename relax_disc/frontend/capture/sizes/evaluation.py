"""Evaluate expressions of sizes at many sizes at once."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy
from torch.utils._sympy import functions as torch_sympy

from relax_disc.errors import UnsupportedOperatorError

OPEN_END = 1 << 16
"""A dim without an upper bound is checked up to this size."""

MOST_POINTS = 1 << 22
"""Conditions over more combinations of sizes than this are not evaluated but refused."""

REMAINDERS = (torch_sympy.Mod, torch_sympy.PythonMod, sympy.Mod)

_QUOTIENTS = (
    *REMAINDERS,
    torch_sympy.FloorDiv,
    torch_sympy.CleanDiv,
    torch_sympy.IntTrueDiv,
    torch_sympy.FloatTrueDiv,
)

_FOLDS: tuple[tuple[Any, Callable[[Any, Any], Any]], ...] = (
    (sympy.Add, operator.add),
    (sympy.Mul, operator.mul),
    ((sympy.Max, torch_sympy.Max), np.maximum),
    ((sympy.Min, torch_sympy.Min), np.minimum),
    (sympy.And, np.logical_and),
    (sympy.Or, np.logical_or),
    (sympy.Eq, np.equal),
    (sympy.Ne, np.not_equal),
    (sympy.Le, np.less_equal),
    (sympy.Lt, np.less),
    (sympy.Ge, np.greater_equal),
    (sympy.Gt, np.greater),
    ((torch_sympy.FloorDiv, torch_sympy.CleanDiv), np.floor_divide),
    (REMAINDERS, np.mod),
    (torch_sympy.PowByNatural, np.power),
    ((sympy.Pow, torch_sympy.FloatPow), np.float_power),
    ((torch_sympy.IntTrueDiv, torch_sympy.FloatTrueDiv), np.true_divide),
    (torch_sympy.ToFloat, operator.add),
)

_OF_ONE: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (sympy.Not, np.logical_not),
    (torch_sympy.OpaqueUnaryFn_sqrt, np.sqrt),
    (torch_sympy.TruncToInt, np.trunc),
    ((sympy.floor, torch_sympy.FloorToInt), np.floor),
    ((sympy.ceiling, torch_sympy.CeilToInt), np.ceil),
    (torch_sympy.RoundToInt, np.round),
)


def example_among(points: np.ndarray) -> Any:
    """Choose one of several sizes, or of rows of sizes, to export at.

    Not the first, which may be equal to others by chance, and not a long one.
    """
    near = points[(points <= 4 * points[0]).reshape(len(points), -1).all(axis=1)]
    return near[len(near) * 3 // 4]


def holds(condition: Any, values: Mapping[sympy.Symbol, np.ndarray]) -> Any:
    """Evaluate a condition for arrays of sizes; one that divides by 0 there does not hold."""
    undefined: list[Any] = []
    found = evaluate(condition, values, undefined)
    return functools.reduce(np.logical_and, map(np.logical_not, undefined), found)


def evaluate(
    expr: Any, values: Mapping[sympy.Symbol, np.ndarray], undefined: list[Any] | None = None
) -> Any:
    """Evaluate an integer or logical expression for arrays of sizes.

    ``undefined``: takes masks of the sizes at which it divides by 0; what is returned there means
    nothing. Raises `UnsupportedOperatorError`: the expression holds an unknown function, or divides
    by 0 and there is no such list.
    """
    if expr in values:
        return values[expr]
    if expr.is_Integer:
        return np.int64(int(expr))
    if expr.is_number and expr.is_real:
        return np.float64(float(expr))
    if expr in (sympy.true, sympy.false):
        return np.bool_(expr == sympy.true)
    args = [evaluate(arg, values, undefined) for arg in expr.args]
    for kind, function in _OF_ONE:
        if isinstance(expr, kind):
            return function(args[0])
    if isinstance(expr, sympy.Pow) and expr.args[1].is_Integer and expr.args[1] >= 0:
        return functools.reduce(operator.mul, itertools.repeat(args[0], int(expr.args[1])))
    if isinstance(expr, _QUOTIENTS) and not np.all(args[1]):
        if undefined is None:
            raise _unknown(f"{expr}, which divides by 0 at some sizes")
        undefined.append(np.equal(args[1], 0))
        args[1] = np.where(undefined[-1], 1, args[1])
    for classes, combine in _FOLDS:
        if isinstance(expr, classes):
            return functools.reduce(combine, args)
    raise _unknown(f"a condition over {type(expr).__name__}")


def _unknown(what: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(f"The model relies on {what}, which cannot be checked.")
