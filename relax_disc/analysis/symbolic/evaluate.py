"""Values, bounds and run-time programs of symbolic expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import Atom, Bound, SymbolicExpr
from relax_disc.errors import GraphError

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# The run-time library (vm_builtins/src) knows these numbers.
PUSH_CONSTANT, PUSH_DIM, ADD, SUB, MUL, FLOORDIV, FLOORMOD, MIN, MAX = range(9)
_OPCODE = {"floordiv": FLOORDIV, "mod": FLOORMOD, "min": MIN, "max": MAX}


def evaluate(expr: SymbolicExpr, sizes: Mapping[str, Any]) -> Any:
    """Return the value of `expr` where each dim has the given size, see `SymbolicExpr.evaluate`."""
    vectorised = any(isinstance(size, np.ndarray) and size.ndim for size in sizes.values())
    if not vectorised:
        return _evaluate_once(expr, sizes)
    arrays = {name: np.asarray(size) for name, size in sizes.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "iu":
            raise GraphError(f"Sizes of dim {name} must be integers, not {array.dtype}.")
    largest = {name: int(np.abs(array).max(initial=0)) for name, array in arrays.items()}
    if max(largest.values(), default=0) <= INT64_MAX and _magnitude(expr, largest) <= INT64_MAX:
        arrays = {name: array.astype(np.int64, copy=False) for name, array in arrays.items()}
        return _evaluate_arrays(expr, arrays)
    exact = _evaluate_arrays(expr, {name: array.astype(object) for name, array in arrays.items()})
    if exact.size and (exact.max() > INT64_MAX or exact.min() < INT64_MIN):
        raise OverflowError(f"{expr} does not fit 64 bits at some of the given sizes.")
    return exact.astype(np.int64)


def bounds(expr: SymbolicExpr, dims: Mapping[str, SymbolicDim]) -> tuple[Bound, Bound]:
    """Return an interval that holds every value of `expr`, see `SymbolicExpr.bounds`."""
    lower: Bound = 0
    upper: Bound = 0
    ranges: dict[str, tuple[Bound, Bound]] = {}
    for monomial, coefficient in expr.terms.items():
        interval: tuple[Bound, Bound] = (coefficient, coefficient)
        for index, factor in enumerate(monomial):
            if index and monomial[index - 1] == factor:
                continue
            if factor not in ranges:
                ranges[factor] = _factor_bounds(expr.symbols[factor], factor, dims)
            interval = _multiply(interval, _power(ranges[factor], monomial.count(factor)))
        lower = None if lower is None or interval[0] is None else lower + interval[0]
        upper = None if upper is None or interval[1] is None else upper + interval[1]
    return lower, upper


def program(expr: SymbolicExpr, dim_order: Sequence[str]) -> tuple[int, ...]:
    """Return `expr` as postfix code over int64 for the run-time library.

    Opcodes: ``0 v`` push the number v, ``1 i`` push dim ``dim_order[i]``, ``2`` add, ``3``
    subtract, ``4`` multiply, ``5`` floor division, ``6`` floor remainder, ``7`` minimum, ``8``
    maximum.  The interpreter must use arithmetic that reports overflow (each step, the
    intermediate results too): Python's integers have no limit, 64 bits do.  A program whose
    steps all stay inside 64 bits gives exactly `SymbolicExpr.evaluate`.

    Raises
    ------
    GraphError
        A dim is not in `dim_order`, or a constant does not fit 64 bits.
    """
    index = {name: position for position, name in enumerate(dim_order)}
    code: list[int] = []
    _emit(expr, index, code)
    return tuple(code)


def _evaluate_once(expr: SymbolicExpr, sizes: Mapping[str, Any]) -> int:
    total = 0
    symbols = expr.symbols
    for monomial, coefficient in expr.terms.items():
        product = coefficient
        for factor in monomial:
            size = sizes.get(factor)
            if size is None:
                symbol = symbols[factor]
                if isinstance(symbol, SymbolicDim):
                    raise _missing(expr, factor)
                size = _apply(symbol, [_evaluate_once(arg, sizes) for arg in symbol.args])
            product *= int(size)
        total += product
    return total


def _apply(atom: Atom, values: Sequence[int]) -> int:
    if atom.kind == "min":
        return min(values)
    if atom.kind == "max":
        return max(values)
    if values[1] == 0:
        raise GraphError(f"{atom}: division by zero at the given sizes.")
    return values[0] // values[1] if atom.kind == "floordiv" else values[0] % values[1]


def _evaluate_arrays(expr: SymbolicExpr, sizes: Mapping[str, np.ndarray]) -> np.ndarray:
    """Evaluate without a check for overflow, in the dtype of the arrays."""
    dtype = next(iter(sizes.values())).dtype
    total = np.zeros(np.broadcast_shapes(*(size.shape for size in sizes.values())), dtype)
    for monomial, coefficient in expr.terms.items():
        product: Any = coefficient
        for factor in monomial:
            product = product * _factor_array(expr, factor, sizes)
        total = total + product
    return total


def _factor_array(expr: SymbolicExpr, factor: str, sizes: Mapping[str, np.ndarray]) -> np.ndarray:
    if factor in sizes:
        return sizes[factor]
    symbol = expr.symbols[factor]
    if isinstance(symbol, SymbolicDim):
        raise _missing(expr, factor)
    values = [_evaluate_arrays(arg, sizes) for arg in symbol.args]
    if symbol.kind in ("min", "max"):
        combine = np.minimum if symbol.kind == "min" else np.maximum
        result = values[0]
        for value in values[1:]:
            result = combine(result, value)
        return result
    if (values[1] == 0).any():
        raise GraphError(f"{symbol}: division by zero at the given sizes.")
    return values[0] // values[1] if symbol.kind == "floordiv" else values[0] % values[1]


def _magnitude(expr: SymbolicExpr, largest: Mapping[str, int]) -> int:
    """Return a number that no value, partial sum or product can exceed in size."""
    total = 0
    for monomial, coefficient in expr.terms.items():
        total += abs(coefficient) * prod(_factor_magnitude(expr, f, largest) for f in monomial)
    return total


def _factor_magnitude(expr: SymbolicExpr, factor: str, largest: Mapping[str, int]) -> int:
    if factor in largest:
        return max(largest[factor], 1)
    symbol = expr.symbols[factor]
    if isinstance(symbol, SymbolicDim):
        raise _missing(expr, factor)
    return max(1, *(_magnitude(arg, largest) for arg in symbol.args))


def _missing(expr: SymbolicExpr, name: str) -> GraphError:
    return GraphError(f"{expr} cannot be evaluated: dim {name} was given no size.")


def _factor_bounds(
    symbol: SymbolicDim | Atom, name: str, dims: Mapping[str, SymbolicDim]
) -> tuple[Bound, Bound]:
    if isinstance(symbol, SymbolicDim):
        dim = symbol.intersect(dims[name]) if name in dims else symbol
        return dim.first, dim.last
    intervals = [bounds(arg, dims) for arg in symbol.args]
    if symbol.kind in ("min", "max"):
        choose = min if symbol.kind == "min" else max
        lowers, uppers = zip(*intervals, strict=True)
        known_lowers = [lower for lower in lowers if lower is not None]
        known_uppers = [upper for upper in uppers if upper is not None]
        some = symbol.kind == "max"  # one known lower bound bounds a maximum
        lower = (
            choose(known_lowers)
            if len(known_lowers) == len(lowers) or (some and known_lowers)
            else None
        )
        upper = (
            choose(known_uppers)
            if len(known_uppers) == len(uppers) or (not some and known_uppers)
            else None
        )
        return lower, upper
    (low, high), (divisor_low, divisor_high) = intervals
    if divisor_low is None or divisor_low < 1:
        return None, None
    if symbol.kind == "mod":
        upper = None if divisor_high is None else divisor_high - 1
        if low is not None and low >= 0 and high is not None:
            upper = high if upper is None else min(upper, high)
        return 0, upper
    # Rounding down keeps order, and a quotient by a positive number is extreme at an end.
    lower = None
    if low is not None:
        lower = (
            low // divisor_low if low < 0 else (0 if divisor_high is None else low // divisor_high)
        )
    upper = None
    if high is not None:
        upper = (
            high // divisor_low
            if high >= 0
            else (-1 if divisor_high is None else high // divisor_high)
        )
    return lower, upper


def _power(interval: tuple[Bound, Bound], exponent: int) -> tuple[Bound, Bound]:
    lower, upper = interval
    if exponent == 1:
        return interval
    if lower is not None and lower >= 0:
        return lower**exponent, None if upper is None else upper**exponent
    result = interval
    for _ in range(exponent - 1):
        result = _multiply(result, interval)
    return result


def _multiply(left: tuple[Bound, Bound], right: tuple[Bound, Bound]) -> tuple[Bound, Bound]:
    infinite = float("inf")
    ends_left = (
        -infinite if left[0] is None else left[0],
        infinite if left[1] is None else left[1],
    )
    ends_right = (
        -infinite if right[0] is None else right[0],
        infinite if right[1] is None else right[1],
    )
    # 0 times an infinite end is 0: the end is a limit, never a value.
    products = [0 if a == 0 or b == 0 else _product(a, b) for a in ends_left for b in ends_right]
    low, high = min(products), max(products)
    return (
        None if low == -infinite else int(low),
        None if high == infinite else int(high),
    )


def _product(left: float, right: float) -> float:
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    return float("inf") if (left > 0) == (right > 0) else -float("inf")


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
