"""What the syntax of a function's code tells: names, calls, the parts of a loop's body."""

from __future__ import annotations

import ast
from collections.abc import Iterable

PREFIX = "__relax_disc_"
"""Of the names that prepared code has beside its own."""


def named(node: ast.AST) -> str:
    """Return the name that an expression is; empty if it is another."""
    return node.id if isinstance(node, ast.Name) else ""


def called(call: ast.Call) -> str:
    """Return the name of a function that is called; empty if it has none."""
    return named(call.func)


def parts_of(loop: ast.For) -> list[ast.AST]:
    """List all that a loop's body holds."""
    return [part for statement in loop.body for part in ast.walk(statement)]


def bound_names(nodes: Iterable[ast.AST]) -> set[str]:
    """List the names that are bound."""
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
