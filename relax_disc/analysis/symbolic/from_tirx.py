"""Between TVM's integer expressions and `SymbolicExpr`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tvm import ir, tirx

from relax_disc.analysis.symbolic.comparison.compare import Order, compare
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import ExprLike, SymbolicExpr, as_expr
from relax_disc.errors import GraphError


def from_tirx(expr: Any, dims: Mapping[Any, ExprLike] | None = None) -> SymbolicExpr:
    """Return a TVM integer expression as a canonical expression.

    ``expr``: over ``+ - * // %``, min, max, casts between integers, truncating division of what is
    provably not negative, and choices whose condition holds at every shape or at none. ``dims``:
    what a variable stands for, by `tvm.tirx.Var` or by its name; any other variable is a dim of its
    own name and of 1 or more.

    Raises `GraphError`: another operation occurs (undecided conditions, calls, loads, floats).
    """
    if isinstance(expr, int):
        return as_expr(expr)
    table = {} if dims is None else dims
    match expr:
        case tirx.IntImm():
            return as_expr(int(expr.value))
        case tirx.Var():
            if not _is_integer(expr):
                raise _refuse(expr, f"it is a variable of type {expr.ty}, not an integer")
            if expr in table:
                return as_expr(table[expr])
            if expr.name in table:
                return as_expr(table[expr.name])
            return SymbolicExpr.dim(SymbolicDim(expr.name))
        case tirx.Cast():
            if not _is_integer(expr.value):
                raise _refuse(expr, "casts a number that is no integer")
            return from_tirx(expr.value, table)
        case tirx.Select():
            return _choose(expr, expr.condition, expr.true_value, expr.false_value, table)
        case ir.Call() if getattr(expr.op, "name", "").endswith(".if_then_else"):
            condition, yes, no = expr.args
            return _choose(expr, condition, yes, no, table)
    kind = type(expr)
    if kind not in _BINARY:
        raise _refuse(expr, f"{kind.__name__} is not size arithmetic")
    left, right = from_tirx(expr.a, table), from_tirx(expr.b, table)
    if kind in (tirx.Div, tirx.Mod):
        lower, divisor_lower = left.bounds()[0], right.bounds()[0]
        if lower is None or lower < 0 or divisor_lower is None or divisor_lower < 1:
            raise _refuse(expr, "it truncates, and an operand may be negative; use floordiv")
    return _BINARY[kind](left, right)


def elements(shape: Iterable[Any]) -> SymbolicExpr:
    """Return the number of elements of a shape; `GraphError` where that is no polynomial."""
    size = SymbolicExpr.constant(1)
    for extent in shape:
        size = size * from_tirx(extent)
    return size


def to_tirx(expr: ExprLike, variables: Mapping[str, Any], dtype: str = "int64") -> Any:
    """Return an expression as a TVM expression.

    ``variables``: the variable of each free dim. ``dtype``: type of the constants.

    Raises `GraphError`: a dim has no variable.
    """
    expr = as_expr(expr)
    total = None
    for monomial, coefficient in expr.terms.items():
        term = None
        for factor in monomial:
            value = _factor(expr, factor, variables, dtype)
            term = value if term is None else term * value
        if term is None:
            term = tirx.const(coefficient, dtype)
        elif coefficient != 1:
            term = term * tirx.const(coefficient, dtype)
        total = term if total is None else total + term
    return tirx.const(0, dtype) if total is None else total


def _factor(expr: SymbolicExpr, factor: str, variables: Mapping[str, Any], dtype: str) -> Any:
    symbol = expr.symbols[factor]
    if isinstance(symbol, SymbolicDim):
        if factor not in variables:
            raise GraphError(f"{expr}: no TVM variable was given for dim {factor}.")
        return variables[factor]
    values = [to_tirx(arg, variables, dtype) for arg in symbol.args]
    combine = _TO_TIRX[symbol.kind]
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    return result


def _choose(
    expr: Any, condition: Any, yes: Any, no: Any, table: Mapping[Any, ExprLike]
) -> SymbolicExpr:
    orders = _CONDITIONS.get(type(condition))
    if orders is None:
        raise _refuse(expr, f"its condition is {type(condition).__name__}")
    left, right = from_tirx(condition.a, table), from_tirx(condition.b, table)
    order = compare(left, right).order
    if order in orders[0]:
        return from_tirx(yes, table)
    if order in orders[1]:
        return from_tirx(no, table)
    raise _refuse(expr, f"its condition ({left} against {right}) depends on the shape")


def _is_integer(expr: Any) -> bool:
    kind = expr.ty
    return isinstance(kind, ir.PrimType) and str(kind.dtype).startswith(("int", "uint", "bool"))


def _refuse(expr: Any, why: str) -> GraphError:
    return GraphError(f"The size {expr} cannot be analysed: {why}.")


_BINARY = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
    tirx.Div: lambda a, b: a // b,
    tirx.Mod: lambda a, b: a % b,
    tirx.Min: lambda a, b: a.minimum(b),
    tirx.Max: lambda a, b: a.maximum(b),
}
# By condition: the orders in which it always holds, and those in which it never does.
_CONDITIONS = {
    tirx.LT: ((Order.LESS,), (Order.GREATER, Order.GREATER_EQUAL, Order.EQUAL)),
    tirx.LE: ((Order.LESS, Order.LESS_EQUAL, Order.EQUAL), (Order.GREATER,)),
    tirx.GT: ((Order.GREATER,), (Order.LESS, Order.LESS_EQUAL, Order.EQUAL)),
    tirx.GE: ((Order.GREATER, Order.GREATER_EQUAL, Order.EQUAL), (Order.LESS,)),
    tirx.EQ: ((Order.EQUAL,), (Order.LESS, Order.GREATER)),
    tirx.NE: ((Order.LESS, Order.GREATER), (Order.EQUAL,)),
}
_TO_TIRX = {"floordiv": tirx.floordiv, "mod": tirx.floormod, "min": tirx.min, "max": tirx.max}
