"""What a trace relies on of sizes that only the data tell: a call checks it once it has counted.

``hidden[ends].view(batch, -1, width)`` needs a count that is a multiple of the batch's size;
``head(hidden[mask])`` with one label a row, as many as there are rows.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import sympy
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions as torch_sympy

_RELATIONS = (sympy.Eq, sympy.Ne, sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)


def conditions_on(node: fx.Node, symbol: sympy.Symbol) -> list[Any]:
    """Return what the trace relies on of a size that a node counts."""
    leaf = pytree.tree_leaves(node.meta["val"])[0]
    env = leaf.fake_mode.shape_env if isinstance(leaf, Tensor) else leaf.node.shape_env
    found = [each.expr for each in env.deferred_runtime_asserts.get(symbol, ())]
    if symbol in env.replacements:
        found.append(sympy.Eq(symbol, env.replacements[symbol], evaluate=False))
    parts = (part for condition in found for part in sympy.And.make_args(condition))
    conditions = [_without_factor(_of_dims(part, env)) for part in parts]
    return [condition for condition in conditions if not _always_holds(condition)]


def is_checkable(condition: Any, counted: Set[sympy.Symbol]) -> bool:
    """Whether a condition compares sizes that a call knows: dims, and the symbols ``counted``."""
    return isinstance(condition, _RELATIONS) and free_unbacked_symbols(condition) <= counted


_FEW = 4


def _always_holds(condition: Any) -> bool:
    """Whether a condition is one of sizes that are no less than 0 or 1, or holds where tried.

    That is, on one counted size, at a few sizes and at all beyond.
    """
    if isinstance(condition, sympy.Ge | sympy.Le) and _is_never_less(condition.gts, condition.lts):
        return True
    counted = condition.free_symbols
    if len(counted) != 1 or counted != free_unbacked_symbols(condition):
        return False
    beyond = sympy.Symbol("beyond", integer=True, nonnegative=True) + _FEW
    plain = condition.replace(torch_sympy.Max, sympy.Max).replace(torch_sympy.Min, sympy.Min)
    sizes = [*map(sympy.Integer, range(_FEW)), beyond]
    return all(plain.subs(symbol, size) == True for symbol in counted for size in sizes)  # noqa: E712


def _is_never_less(more: Any, less: Any) -> bool:
    """Whether one size is at least another, dims being 1 or more, and counts 0 or more."""
    counted = free_unbacked_symbols(more - less)
    known = {
        symbol: sympy.Dummy(
            integer=True, **{"nonnegative" if symbol in counted else "positive": True}
        )
        for symbol in (more - less).free_symbols
    }

    def quotient(x: Any, by: Any) -> Any:
        if x.is_nonnegative and by.is_positive:
            return sympy.Dummy(integer=True, nonnegative=True)
        return sympy.Dummy(integer=True)

    found = (more - less).xreplace(known)
    for kind, plain in ((torch_sympy.Max, sympy.Max), (torch_sympy.Min, sympy.Min)):
        found = found.replace(kind, plain)
    return bool(found.replace(torch_sympy.FloorDiv, quotient).is_nonnegative)


def _of_dims(condition: Any, env: ShapeEnv) -> Any:
    """Name each size of the batch as the trace does, which has found some of them equal since."""
    counted = free_unbacked_symbols(condition)
    return condition.xreplace({s: env.replace(s) for s in condition.free_symbols - counted})


def _without_factor(condition: Any) -> Any:
    """Write ``(32*n) % (32*m) == 0``, of rows of 32, as ``n % m == 0``."""
    sides = condition.args if isinstance(condition, sympy.Eq) else ()
    if len(sides) != 2 or sides[1] != 0 or not isinstance(sides[0], torch_sympy.Mod):
        return condition
    factor = sympy.gcd(*sides[0].args)
    value, divisor = (sympy.cancel(x / factor) for x in sides[0].args)
    return sympy.Eq(torch_sympy.Mod(value, divisor), 0, evaluate=False)
