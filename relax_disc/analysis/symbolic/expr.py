"""Canonical integer polynomials over symbolic dims: element counts, bytes, flops.

An expression is a sum of monomials with integer coefficients.  A factor of a monomial is a dim or
an *atom*: a floor division, a remainder, a minimum or a maximum of canonical expressions.  Equal
polynomials have equal representations, so ``==`` proves equality and costs a dictionary lookup.
Two spellings of one function that differ in their atoms may still be unequal; ``compare`` looks
deeper.

A factor is kept as text (a dim's name, or the canonical text of an atom) and a monomial as a
sorted tuple of factors with repetition, so that hashing and multiplying are plain tuple work; a
side table maps each text to the `SymbolicDim` or `Atom` it stands for.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import gcd
from typing import Any, Union

import numpy as np

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.errors import GraphError

Monomial = tuple[str, ...]
ExprLike = Union["SymbolicExpr", SymbolicDim, int]
Bound = int | None

_ONE: Monomial = ()


@dataclass(frozen=True, slots=True)
class Atom:
    """A non-polynomial factor; ``kind`` is floordiv, mod, min or max."""

    kind: str
    args: tuple[SymbolicExpr, ...]

    @property
    def free_dims(self) -> tuple[SymbolicDim, ...]:
        """Dims on which the arguments depend."""
        return tuple(dim for arg in self.args for dim in arg.free_dims)

    def __str__(self) -> str:
        if self.kind in ("min", "max"):
            return f"{self.kind}({', '.join(map(str, self.args))})"
        left, right = (_parenthesised(arg) for arg in self.args)
        return f"({left} {'//' if self.kind == 'floordiv' else '%'} {right})"


class SymbolicExpr:
    """An immutable, hashable, canonical polynomial over dims and atoms.

    Build one with `constant`, `dim`, `parse` or by arithmetic with ``+ - * // %``, `minimum`
    and `maximum`; integers and dims mix in freely.  Division and remainder round down, as in
    Python.
    """

    __slots__ = ("_hash", "_symbols", "_terms", "_text")
    __array_ufunc__ = None  # numpy integers on the left leave the arithmetic to this class

    _terms: dict[Monomial, int]
    _symbols: dict[str, SymbolicDim | Atom]
    _hash: int | None
    _text: str | None

    def __init__(self, value: ExprLike = 0) -> None:
        expr = as_expr(value)
        self._terms, self._symbols = expr._terms, expr._symbols
        self._hash = self._text = None

    @classmethod
    def _make(
        cls, terms: dict[Monomial, int], symbols: dict[str, SymbolicDim | Atom]
    ) -> SymbolicExpr:
        self = object.__new__(cls)
        self._terms = terms
        self._symbols = symbols
        self._hash = self._text = None
        return self

    @classmethod
    def constant(cls, value: int) -> SymbolicExpr:
        """Return the expression of one integer."""
        value = int(value)
        return cls._make({_ONE: value} if value else {}, {})

    @classmethod
    def dim(cls, dim: SymbolicDim | str) -> SymbolicExpr:
        """Return the expression of one dim; a bare name means a dim of 1 or more."""
        if isinstance(dim, str):
            dim = SymbolicDim(dim)
        return cls._make({(dim.name,): 1}, {dim.name: dim})

    @classmethod
    def parse(
        cls, text: str, dims: Mapping[str, SymbolicDim] | Iterable[SymbolicDim] = ()
    ) -> SymbolicExpr:
        """Read what `str` writes (and any Python-like arithmetic over dims).

        Parameters
        ----------
        text : str
            For example ``"12*batch*seq**2 + 4*((seq + 63) // 64)"``.
        dims : mapping or iterable of SymbolicDim
            What is known of the names; any other name is a dim of 1 or more.

        Raises
        ------
        GraphError
            The text is not an integer expression.
        """
        table = dim_table(dims)
        return _parse(text, lambda name: cls.dim(table[name] if name in table else name))

    @property
    def terms(self) -> Mapping[Monomial, int]:
        """Coefficients by monomial; do not change."""
        return self._terms

    @property
    def symbols(self) -> Mapping[str, SymbolicDim | Atom]:
        """Meaning of the factors (and maybe of more names); do not change."""
        return self._symbols

    @property
    def free_dims(self) -> tuple[SymbolicDim, ...]:
        """Dims on which the expression depends, atoms included, sorted by name."""
        found: dict[str, SymbolicDim] = {}
        for factor in set(chain.from_iterable(self._terms)):
            symbol = self._symbols[factor]
            for dim in (symbol,) if isinstance(symbol, SymbolicDim) else symbol.free_dims:
                found[dim.name] = found[dim.name].intersect(dim) if dim.name in found else dim
        return tuple(found[name] for name in sorted(found))

    @property
    def is_constant(self) -> bool:
        """Whether no dim occurs."""
        return not self._terms or (len(self._terms) == 1 and _ONE in self._terms)

    @property
    def is_polynomial(self) -> bool:
        """Whether no atom occurs."""
        symbols = self._symbols
        for factor in set(chain.from_iterable(self._terms)):
            if not isinstance(symbols[factor], SymbolicDim):
                return False
        return True

    def as_int(self) -> int:
        """Return the value of a constant expression; GraphError for any other."""
        if not self.is_constant:
            raise GraphError(f"{self} is not a number: it depends on {_names(self.free_dims)}.")
        return self._terms.get(_ONE, 0)

    def __bool__(self) -> bool:
        return bool(self._terms)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SymbolicExpr):
            return self._terms == other._terms
        if isinstance(other, int):
            return self.is_constant and self._terms.get(_ONE, 0) == other
        return NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            constant = self.is_constant
            self._hash = hash(
                self._terms.get(_ONE, 0) if constant else frozenset(self._terms.items())
            )
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return SymbolicExpr._make, (self._terms, self._symbols)

    def __str__(self) -> str:
        if self._text is None:
            self._text = _format_terms(self._terms)
        return self._text

    def __repr__(self) -> str:
        return f"SymbolicExpr({str(self)!r})"

    def __neg__(self) -> SymbolicExpr:
        return self._make({m: -c for m, c in self._terms.items()}, self._symbols)

    def __pos__(self) -> SymbolicExpr:
        return self

    def __add__(self, other: ExprLike) -> SymbolicExpr:
        if not isinstance(other, ExprTypes):
            return NotImplemented
        right = as_expr(other)
        return self._make(
            add_terms(self._terms, right._terms, 1), merge_symbols(self._symbols, right._symbols)
        )

    __radd__ = __add__

    def __sub__(self, other: ExprLike) -> SymbolicExpr:
        if not isinstance(other, ExprTypes):
            return NotImplemented
        right = as_expr(other)
        return self._make(
            add_terms(self._terms, right._terms, -1), merge_symbols(self._symbols, right._symbols)
        )

    def __rsub__(self, other: ExprLike) -> SymbolicExpr:
        return as_expr(other) - self

    def __mul__(self, other: ExprLike) -> SymbolicExpr:
        if not isinstance(other, ExprTypes):
            return NotImplemented
        right = as_expr(other)
        terms: dict[Monomial, int] = {}
        for left_monomial, left_coefficient in self._terms.items():
            for right_monomial, right_coefficient in right._terms.items():
                if left_monomial and right_monomial:
                    monomial = tuple(sorted(left_monomial + right_monomial))
                else:
                    monomial = left_monomial or right_monomial
                terms[monomial] = terms.get(monomial, 0) + left_coefficient * right_coefficient
        terms = {m: c for m, c in terms.items() if c}
        return self._make(terms, merge_symbols(self._symbols, right._symbols))

    __rmul__ = __mul__

    def __pow__(self, exponent: int) -> SymbolicExpr:
        if not isinstance(exponent, int) or exponent < 0:
            raise GraphError(f"({self})**{exponent}: the exponent must be 0 or a positive integer.")
        result = SymbolicExpr.constant(1)
        for _ in range(exponent):
            result = result * self
        return result

    def __floordiv__(self, other: ExprLike) -> SymbolicExpr:
        if not isinstance(other, ExprTypes):
            return NotImplemented
        from relax_disc.analysis.symbolic.atoms import floordiv

        return floordiv(self, as_expr(other))

    def __rfloordiv__(self, other: ExprLike) -> SymbolicExpr:
        return as_expr(other) // self

    def __mod__(self, other: ExprLike) -> SymbolicExpr:
        if not isinstance(other, ExprTypes):
            return NotImplemented
        from relax_disc.analysis.symbolic.atoms import mod

        return mod(self, as_expr(other))

    def __rmod__(self, other: ExprLike) -> SymbolicExpr:
        return as_expr(other) % self

    def minimum(self, *others: ExprLike) -> SymbolicExpr:
        """Return the least of this and the other expressions."""
        from relax_disc.analysis.symbolic.atoms import extremum

        return extremum("min", [self, *map(as_expr, others)])

    def maximum(self, *others: ExprLike) -> SymbolicExpr:
        """Return the greatest of this and the other expressions."""
        from relax_disc.analysis.symbolic.atoms import extremum

        return extremum("max", [self, *map(as_expr, others)])

    def substitute(self, values: Mapping[str, ExprLike]) -> SymbolicExpr:
        """Replace dims by expressions, inside atoms as well; all at once."""
        from relax_disc.analysis.symbolic.atoms import substitute

        return substitute(self, {name: as_expr(value) for name, value in values.items()})

    def evaluate(self, sizes: Mapping[str, int | np.ndarray]) -> Any:
        """Return the value at one shape (``int``), or at many (integer array).

        Parameters
        ----------
        sizes : mapping of str to int or integer array
            The size of each free dim; arrays broadcast against each other.

        Raises
        ------
        GraphError
            A dim has no size, or a divisor is 0.
        OverflowError
            A value of the array form does not fit int64.  (One shape is always exact.)
        """
        from relax_disc.analysis.symbolic.evaluate import evaluate

        return evaluate(self, sizes)

    def bounds(
        self, dims: Mapping[str, SymbolicDim] | Iterable[SymbolicDim] = ()
    ) -> tuple[Bound, Bound]:
        """Return ``(lower, upper)`` that enclose all values; ``None`` is no limit.

        Interval arithmetic term by term: always valid, tight where all coefficients have one
        sign.  `dims` are declarations to use on top of the expression's own.
        """
        from relax_disc.analysis.symbolic.evaluate import bounds

        return bounds(self, dim_table(dims))

    def program(self, dim_order: Iterable[str]) -> tuple[int, ...]:
        """Return postfix code for the run-time library, see `symbolic_evaluate.program`."""
        from relax_disc.analysis.symbolic.evaluate import program

        return program(self, list(dim_order))


ExprTypes = (SymbolicExpr, SymbolicDim, int, np.integer)


def as_expr(value: ExprLike) -> SymbolicExpr:
    """Return an integer, a dim or an expression as an expression."""
    if isinstance(value, SymbolicExpr):
        return value
    if isinstance(value, SymbolicDim):
        return SymbolicExpr.dim(value)
    if hasattr(value, "__index__"):  # Python and numpy integers; floats are refused
        return SymbolicExpr.constant(value.__index__())
    raise GraphError(f"A size must be an integer or a symbolic expression, not {value!r}.")


def dim_table(dims: Mapping[str, SymbolicDim] | Iterable[SymbolicDim]) -> dict[str, SymbolicDim]:
    """Return dims by name."""
    return {dim.name: dim for dim in (dims.values() if isinstance(dims, Mapping) else dims)}


def add_terms(
    left: dict[Monomial, int], right: dict[Monomial, int], sign: int
) -> dict[Monomial, int]:
    """Return ``left + sign*right`` without zero coefficients."""
    terms = left.copy()
    for monomial, coefficient in right.items():
        total = terms.get(monomial, 0) + sign * coefficient
        if total:
            terms[monomial] = total
        else:
            del terms[monomial]
    return terms


def merge_symbols(
    left: dict[str, SymbolicDim | Atom], right: dict[str, SymbolicDim | Atom]
) -> dict[str, SymbolicDim | Atom]:
    """Return one table; a dim that is declared twice keeps what both declarations say."""
    if left is right or not right:
        return left
    if not left:
        return right
    merged = None
    for name, symbol in right.items():
        known = left.get(name)
        if known is symbol:
            continue
        if isinstance(known, SymbolicDim) and isinstance(symbol, SymbolicDim):
            symbol = known.intersect(symbol)
            if symbol is known:
                continue
        elif known is not None:
            continue  # an atom's text says all about it
        merged = left.copy() if merged is None else merged
        merged[name] = symbol
    return left if merged is None else merged


def content(expr: SymbolicExpr) -> int:
    """Return the greatest common divisor of all coefficients."""
    return gcd(*expr._terms.values())


def _parenthesised(expr: SymbolicExpr) -> str:
    text = str(expr)
    if expr.is_constant and not text.startswith("-"):
        return text
    single = len(expr.terms) == 1 and next(iter(expr.terms.items()))
    return text if single and single[1] == 1 and len(single[0]) == 1 else f"({text})"


def _names(dims: Iterable[SymbolicDim]) -> str:
    return ", ".join(dim.name for dim in dims)


def _format_terms(terms: Mapping[Monomial, int]) -> str:
    """Return the canonical text of a polynomial, highest degree first."""
    if not terms:
        return "0"
    pieces: list[str] = []
    for monomial in sorted(terms, key=lambda monomial: (-len(monomial), monomial)):
        coefficient = terms[monomial]
        if pieces:
            pieces.append(" - " if coefficient < 0 else " + ")
        elif coefficient < 0:
            pieces.append("-")
        size = abs(coefficient)
        factors = [] if size == 1 and monomial else [str(size)]
        for factor in dict.fromkeys(monomial):
            power = monomial.count(factor)
            factors.append(factor if power == 1 else f"{factor}**{power}")
        pieces.append("*".join(factors))
    return "".join(pieces)


def _parse(text: str, make_dim: Callable[[str], SymbolicExpr]) -> SymbolicExpr:
    """Read an expression; see `SymbolicExpr.parse`.

    ``text``: arithmetic with ``+ - * // % **``, parentheses, ``min`` and ``max``. ``make_dim``:
    gives the expression of a name.

    Raises `GraphError`: the text holds anything else.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise GraphError(f"Cannot read the size expression {text!r}: {error}.") from error

    def refuse(node: ast.AST) -> GraphError:
        return GraphError(
            f"Cannot read the size expression {text!r}: {ast.unparse(node)!r} is none of integer, "
            "dim, + - * // % **, min, max."
        )

    def visit(node: ast.expr) -> SymbolicExpr:
        match node:
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                return as_expr(value)
            case ast.Name(id=name):
                return make_dim(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -visit(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return visit(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
                return visit(left) ** power
            case ast.BinOp(left=left, op=operator, right=right):
                return binary(node, operator, visit(left), visit(right))
            case ast.Call(func=ast.Name(id=("min" | "max") as kind), args=args, keywords=[]) if (
                args
            ):
                first, *others = map(visit, args)
                return first.minimum(*others) if kind == "min" else first.maximum(*others)
        raise refuse(node)

    def binary(
        node: ast.AST, operator: ast.operator, left: SymbolicExpr, right: SymbolicExpr
    ) -> SymbolicExpr:
        match operator:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.FloorDiv():
                return left // right
            case ast.Mod():
                return left % right
        raise refuse(node)

    return visit(tree)
