"""Values, bounds and run-time programs of symbolic expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import Atom, Bound, SymbolicExpr
from relax_disc.errors import GraphError

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# The run-time library (vm_builtins/src) knows these numbers.
PUSH_CONSTANT, PUSH_DIM, ADD, SUB, MUL, FLOORDIV, FLOORMOD, MIN, MAX = range(9)
_OPCODE = {"floordiv": FLOORDIV, "mod": FLOORMOD, "min": MIN, "max": MAX}


def fold(
    expr: SymbolicExpr,
    dim: Callable[[SymbolicDim], Any],
    atom: Callable[[Atom, list[Any]], Any],
    number: Callable[[int], Any] = int,
) -> Any:
    """Return the value of `expr` in any domain that adds and multiplies.

    ``dim``, ``atom``, ``number``: the value of a dim, of an atom whose arguments have the given
    values, and of an integer.
    """
    total = number(0)
    for monomial, coefficient in expr.terms.items():
        product = number(coefficient)
        for factor in monomial:
            symbol = expr.symbols[factor]
            if isinstance(symbol, Atom):
                args = [fold(arg, dim, atom, number) for arg in symbol.args]
                product = product * atom(symbol, args)
            else:
                product = product * dim(symbol)
        total = total + product
    return total


def evaluate(expr: SymbolicExpr, sizes: Mapping[str, Any]) -> Any:
    """Return the value of `expr` where each dim has the given size, see `SymbolicExpr.evaluate`."""
    try:
        return _evaluate(expr, sizes)
    except KeyError as error:
        raise GraphError(
            f"{expr} cannot be evaluated: dim {error.args[0]} was given no size."
        ) from None


def _evaluate(expr: SymbolicExpr, sizes: Mapping[str, Any]) -> Any:
    if not any(isinstance(size, np.ndarray) and size.ndim for size in sizes.values()):
        return fold(expr, lambda dim: int(sizes[dim.name]), _atom_of_numbers)
    arrays = {name: np.asarray(size) for name, size in sizes.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "iu":
            raise GraphError(f"Sizes of dim {name} must be integers, not {array.dtype}.")
    shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
    largest = {name: max(int(np.abs(a).max(initial=0)), 1) for name, a in arrays.items()}
    # No value, partial sum or product can exceed this in size.
    magnitude = fold(expr, lambda dim: largest[dim.name], lambda _, args: max(1, *args), abs)
    if max(magnitude, *largest.values()) <= INT64_MAX:
        arrays = {name: array.astype(np.int64, copy=False) for name, array in arrays.items()}
        values = fold(expr, lambda dim: arrays[dim.name], _atom_of_arrays)
        return np.broadcast_to(np.asarray(values, np.int64), shape)
    arrays = {name: array.astype(object) for name, array in arrays.items()}
    exact = np.broadcast_to(
        np.asarray(fold(expr, lambda dim: arrays[dim.name], _atom_of_arrays), object), shape
    )
    if exact.size and (exact.max() > INT64_MAX or exact.min() < INT64_MIN):
        raise OverflowError(f"{expr} does not fit 64 bits at some of the given sizes.")
    return exact.astype(np.int64)


def bounds(expr: SymbolicExpr, dims: Mapping[str, SymbolicDim]) -> tuple[Bound, Bound]:
    """Return an interval that holds every value of `expr`, see `SymbolicExpr.bounds`."""

    def interval(dim: SymbolicDim) -> _Interval:
        whole = dim.intersect(dims[dim.name]) if dim.name in dims else dim
        return _Interval(whole.first, _INFINITE if whole.last is None else whole.last)

    found = fold(expr, interval, _atom_of_intervals, lambda number: _Interval(number, number))
    return (
        None if found.lower == -_INFINITE else int(found.lower),
        None if found.upper == _INFINITE else int(found.upper),
    )


def program(expr: SymbolicExpr, dim_order: Sequence[str]) -> tuple[int, ...]:
    """Return `expr` as postfix code over int64 for the run-time library.

    Opcodes: ``0 v`` push the number v, ``1 i`` push dim ``dim_order[i]``, ``2`` add, ``3``
    subtract, ``4`` multiply, ``5`` floor division, ``6`` floor remainder, ``7`` minimum, ``8``
    maximum.  The interpreter must use arithmetic that reports overflow (each step, the
    intermediate results too): Python's integers have no limit, 64 bits do.  A program whose
    steps all stay inside 64 bits gives exactly `SymbolicExpr.evaluate`.

    Raises `GraphError`: a dim is not in `dim_order`, or a constant does not fit 64 bits.
    """
    index = {name: position for position, name in enumerate(dim_order)}
    code: list[int] = []
    _emit(expr, index, code)
    return tuple(code)


def _atom_of_numbers(atom: Atom, values: Sequence[int]) -> int:
    if atom.kind in ("min", "max"):
        return min(values) if atom.kind == "min" else max(values)
    if values[1] == 0:
        raise GraphError(f"{atom}: division by zero at the given sizes.")
    return values[0] // values[1] if atom.kind == "floordiv" else values[0] % values[1]


def _atom_of_arrays(atom: Atom, values: Sequence[Any]) -> Any:
    if atom.kind in ("min", "max"):
        return reduce(np.minimum if atom.kind == "min" else np.maximum, values)
    if not np.all(values[1]):
        raise GraphError(f"{atom}: division by zero at the given sizes.")
    return values[0] // values[1] if atom.kind == "floordiv" else values[0] % values[1]


_INFINITE = float("inf")


@dataclass(slots=True)  # not frozen, which takes twice the time to make
class _Interval:
    """All numbers from one to another; an infinite end is a limit, never a value."""

    lower: int | float
    upper: int | float

    def __add__(self, other: _Interval) -> _Interval:
        return _Interval(_sum(self.lower, other.lower), _sum(self.upper, other.upper))

    def __mul__(self, other: _Interval) -> _Interval:
        if self.lower >= 0 and other.lower >= 0:
            return _Interval(_product(self.lower, other.lower), _product(self.upper, other.upper))
        ends = [
            _product(a, b) for a in (self.lower, self.upper) for b in (other.lower, other.upper)
        ]
        return _Interval(min(ends), max(ends))


def _sum(left: int | float, right: int | float) -> int | float:
    """Add, where an integer may be too long for a float."""
    return left if isinstance(left, float) else right if isinstance(right, float) else left + right


def _product(left: int | float, right: int | float) -> int | float:
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    if left == 0 or right == 0:
        return 0
    return _INFINITE if (left > 0) == (right > 0) else -_INFINITE


def _atom_of_intervals(atom: Atom, parts: Sequence[_Interval]) -> _Interval:
    if atom.kind in ("min", "max"):
        choose = min if atom.kind == "min" else max
        return _Interval(choose(p.lower for p in parts), choose(p.upper for p in parts))
    dividend, divisor = parts
    low, high = dividend.lower, dividend.upper
    if divisor.lower < 1:
        return _Interval(-_INFINITE, _INFINITE)
    if atom.kind == "mod":
        below = divisor.upper if divisor.upper == _INFINITE else divisor.upper - 1
        return _Interval(0, min(high, below) if low >= 0 else below)
    # Rounding down keeps order, and a quotient by a positive number is extreme at an end.
    return _Interval(
        _quotient(low, divisor.lower if low < 0 else divisor.upper),
        _quotient(high, divisor.upper if high < 0 else divisor.lower),
    )


def _quotient(number: int | float, divisor: int | float) -> int | float:
    """Divide by a number of 1 or more, rounding down."""
    if isinstance(number, float):
        return number
    return number // divisor if isinstance(divisor, int) else -1 if number < 0 else 0


def _emit(expr: SymbolicExpr, index: Mapping[str, int], code: list[int]) -> None:
    if not expr.terms:
        code += (PUSH_CONSTANT, 0)
    for position, (monomial, coefficient) in enumerate(expr.terms.items()):
        negative = position > 0 and coefficient < 0
        number = -coefficient if negative else coefficient
        if not INT64_MIN <= number <= INT64_MAX:
            raise GraphError(f"{expr}: the number {number} does not fit 64 bits.")
        pending = 0
        if number != 1 or not monomial:
            code += (PUSH_CONSTANT, number)
            pending = 1
        for factor in monomial:
            _emit_factor(expr, factor, index, code)
            if pending:
                code.append(MUL)
            pending = 1
        if position:
            code.append(SUB if negative else ADD)


def _emit_factor(
    expr: SymbolicExpr, factor: str, index: Mapping[str, int], code: list[int]
) -> None:
    symbol = expr.symbols[factor]
    if isinstance(symbol, SymbolicDim):
        if factor not in index:
            raise GraphError(f"{expr}: dim {factor} is not among {', '.join(index)}.")
        code += (PUSH_DIM, index[factor])
        return
    for position, arg in enumerate(symbol.args):
        _emit(arg, index, code)
        if position:
            code.append(_OPCODE[symbol.kind])
