"""Compare sizes without knowing them.

`compare` answers with an order that holds for every shape in the declared ranges, or with two
witness shapes that prove that there is none, or with UNKNOWN.  It is never wrong: orders are
proved and witnesses evaluated with exact integers.  It is complete up to a limit of work that is
fixed (not a time, so that answers repeat).

Limits: a difference that is small all along a diagonal of long ranges, as ``(x - y)**2 + 1`` is,
stays undecided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from relax_disc.analysis.symbolic.comparison.atom_signs import expression_signs
from relax_disc.analysis.symbolic.comparison.polynomial import NEGATIVE, POSITIVE, ZERO
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import (
    ExprLike,
    SymbolicExpr,
    add_terms,
    as_expr,
    dim_table,
    merge_symbols,
)


class Order(Enum):
    """How the first size relates to the second over all shapes; UNKNOWN is a value."""

    LESS = "<"
    EQUAL = "=="
    GREATER = ">"
    LESS_EQUAL = "<="
    GREATER_EQUAL = ">="
    INCOMPARABLE = "<>"
    UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The order of two sizes.

    Attributes
    ----------
    order : Order
        LESS_EQUAL and GREATER_EQUAL are given where equality occurs or could not be excluded.
    witness_less, witness_greater : dict of str to int, or None
        With INCOMPARABLE only: a shape at which the first size is less, and one at which it is
        greater; every dim of both sizes has a value.
    """

    order: Order
    witness_less: dict[str, int] | None = None
    witness_greater: dict[str, int] | None = None


_ORDERS = {
    NEGATIVE: Comparison(Order.LESS),
    ZERO: Comparison(Order.EQUAL),
    POSITIVE: Comparison(Order.GREATER),
    NEGATIVE | ZERO: Comparison(Order.LESS_EQUAL),
    POSITIVE | ZERO: Comparison(Order.GREATER_EQUAL),
}
_UNKNOWN = Comparison(Order.UNKNOWN)


def compare(
    a: ExprLike, b: ExprLike, dims: Mapping[str, SymbolicDim] | Iterable[SymbolicDim] = ()
) -> Comparison:
    """Compare two sizes over all shapes that their dims allow.

    Parameters
    ----------
    a, b : SymbolicExpr, SymbolicDim or int
        The sizes.
    dims : mapping or iterable of SymbolicDim, optional
        Declarations on top of those that the expressions carry.

    Returns
    -------
    Comparison
        Of `a` to `b`.

    Raises
    ------
    GraphError
        The declarations of a dim contradict each other.
    """
    left, right = as_expr(a), as_expr(b)
    if left._terms == right._terms:
        return _ORDERS[ZERO]
    symbols = merge_symbols(left._symbols, right._symbols)
    if dims:
        symbols = merge_symbols(symbols, dict(dim_table(dims)))
    difference = SymbolicExpr._make(add_terms(left._terms, right._terms, -1), symbols)
    signs = expression_signs(difference)
    if signs.found & NEGATIVE and signs.found & POSITIVE:
        # Dims that cancelled are free to be anything.
        whole: dict[str, int] = {}
        for symbol in symbols.values():
            dims_of = (symbol,) if isinstance(symbol, SymbolicDim) else symbol.free_dims
            for dim in dims_of:
                whole.setdefault(dim.name, dim.first)
        less, greater = whole | signs.points[NEGATIVE], whole | signs.points[POSITIVE]
        return Comparison(Order.INCOMPARABLE, less, greater)
    return _ORDERS.get(signs.possible, _UNKNOWN)


def at_most(
    a: ExprLike | None,
    b: ExprLike | None,
    dims: Mapping[str, SymbolicDim] | Iterable[SymbolicDim] = (),
) -> bool:
    """Whether a size is proved to be no greater than another, at every shape.

    ``a``, ``b``: the sizes; None, a size that is not known, is never proved to be either.
    ``dims``: as of `compare`.
    """
    if a is None or b is None:
        return False
    return compare(a, b, dims).order in (Order.LESS, Order.LESS_EQUAL, Order.EQUAL)
