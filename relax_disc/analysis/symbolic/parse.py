"""Text of symbolic expressions: writing it readably, reading it back."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from relax_disc.analysis.symbolic.expr import Monomial, SymbolicExpr, as_expr
from relax_disc.errors import GraphError


def format_terms(terms: Mapping[Monomial, int]) -> str:
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


def parse(text: str, make_dim: Callable[[str], SymbolicExpr]) -> SymbolicExpr:
    """Read an expression; see `SymbolicExpr.parse`.

    Parameters
    ----------
    text : str
        Arithmetic with ``+ - * // % **``, parentheses, ``min`` and ``max``.
    make_dim : callable
        Gives the expression of a name.

    Raises
    ------
    GraphError
        The text holds anything else.
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
