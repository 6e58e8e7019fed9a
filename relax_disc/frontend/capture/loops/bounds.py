"""What sums of sizes are at least, at every length and in each step of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from relax_disc.frontend.capture.loops.recorded import (
    LastStepDiffers,
    LongerExample,
    RecordedLoops,
    active,
)
from relax_disc.frontend.capture.sizes.dims import least_size, root_of

_LONGEST = 1 << 13  # size that an example is made of


def never_negative(size: Any) -> bool:
    """Whether a sum of sizes is 0 or more by the ranges of the dims and of the loop's step.

    Quotients are known by their remainders: ``4 * ((n + 3) // 4)`` is ``n`` and 0 to 3 more.
    """
    if not isinstance(size, torch.SymInt):
        return size >= 0
    expression: Any = sympy.expand(size.node.expr)
    env: Any = size.node.shape_env
    loops = active()
    if loops is not None and loops.inside is not None:
        expression = _in_worst_step(expression, loops)
    if loops is not None:
        expression = unified(expression, env, loops)
    ranges = _ranges(env, loops)
    if bound_sympy(expression, ranges).lower >= 0:
        return True
    expression = sympy.expand(_without_quotients(expression, ranges, {}))
    return bool(bound_sympy(expression, ranges).lower >= 0)


def bounds_of(size: torch.SymInt) -> Any:
    """Return the range of a size, by the declared dims: PyTorch notes 2 for a least size of 1."""
    env: Any = size.node.shape_env
    return bound_sympy(size.node.expr, _ranges(env, active()))


def _ranges(env: Any, loops: RecordedLoops | None) -> dict[Any, Any]:
    return {
        symbol: ValueRanges(_declared_least(symbol, env, loops), bounds.upper)
        if bounds.is_int and bounds.lower == 2
        else bounds
        for symbol, bounds in env.var_to_range.items()
    }


def factor_of_step(size: torch.SymInt, loops: RecordedLoops) -> Any:
    """Return by how much a size grows with the number of the step, where it is linear in it."""
    return sympy.expand(size.node.expr).coeff(loops.step.node.expr, 1)


def check_last_step(size: torch.SymInt, what: str) -> None:
    """Raise `LastStepDiffers` if a sum of sizes is negative in the last step of a loop alone."""
    loops = active()
    if loops is None or loops.inside is None:
        return
    factor = factor_of_step(size, loops)
    if factor.is_Integer and factor < 0 and never_negative(size - int(factor)):
        raise LastStepDiffers(f"the loop at {loops.inside} {what} in its last step")


def _declared_least(symbol: Any, env: Any, loops: RecordedLoops | None) -> int:
    """Return the least size of a symbol's dim; 1 where that is not known."""
    dims = {} if loops is None else loops.dims
    names = (source.name for source in env.var_to_sources.get(symbol, ()))
    return max((least_size(dims[name]) for name in names if name in dims), default=1)


def fewest(count: torch.SymInt) -> int:
    """Return the steps at the least sizes of the dims."""
    env: Any = count.node.shape_env
    expression: Any = count.node.expr
    lows = {symbol: int(env.var_to_range[symbol].lower) for symbol in expression.free_symbols}
    sizes = {
        symbol: _declared_least(symbol, env, active()) if low <= 2 else low
        for symbol, low in lows.items()
    }
    try:
        return int(expression.xreplace(sizes))
    except (ZeroDivisionError, TypeError):
        return 0  # of sizes that do not go together


def ask_for_longer(*sizes: Any) -> None:
    """Raise `LongerExample` if a size is 0 or 1 in the example, and at another need not be.

    PyTorch takes such a size for the number that it is.
    """
    loops, found = active(), [size for size in sizes if isinstance(size, torch.SymInt)]
    if loops is None or not loops.may_grow or not found:
        return
    env: Any = found[0].node.shape_env
    expressions: list[Any] = [size.node.expr for size in found]
    hints = {s: env.backed_var_to_val.get(s) for e in expressions for s in e.free_symbols}
    if None in hints.values() or _are_many(expressions, hints):
        return
    for symbol, hint in hints.items():
        names = (source.name for source in env.var_to_sources.get(symbol, ()))
        dims = [loops.dims[name] for name in names if name in loops.dims]
        if not dims or root_of(dims[0]) is not dims[0]:
            continue
        for size in range(int(hint) + 1, min(int(dims[0].max), _LONGEST) + 1):
            if _are_many(expressions, {**hints, symbol: size}):
                name = dims[0].__name__
                error = LongerExample(f"the example needs more than {hint} of {name}")
                error.dims, error.fails_at = (name,), {name: size}
                raise error


def _are_many(expressions: Sequence[Any], sizes: dict[Any, Any]) -> bool:
    return all(expression.xreplace(sizes) >= 2 for expression in expressions)


def unified(expression: Any, env: Any, loops: RecordedLoops) -> Any:
    """Write an expression with one symbol for each declared dim; ``env``: of its symbols."""
    firsts: dict[str, Any] = {}
    names: dict[Any, Any] = {}
    for symbol, sources in env.var_to_sources.items():
        for source in sources:
            if source.name in loops.dims:
                names[symbol] = firsts.setdefault(loops.dims[source.name].__name__, symbol)
    return expression.xreplace(names)


def _in_worst_step(expression: Any, loops: RecordedLoops) -> Any:
    """Write an expression for the step in which it is least, if it is linear in its number."""
    number, count = loops.step.node.expr, loops.count.node.expr
    factor = expression.coeff(number, 1)
    rest = sympy.expand(expression - factor * number)
    if not factor.is_Integer or number in rest.free_symbols:
        return expression
    return expression.xreplace({number: count - 1 if factor < 0 else sympy.S.Zero})


def _without_quotients(expression: Any, ranges: dict[Any, Any], known: dict[Any, Any]) -> Any:
    """Write ``e // k`` as ``(e - r) / k`` with a remainder, whose range is entered."""
    if not expression.args:
        return expression
    if expression not in known:
        made = expression.func(*(_without_quotients(x, ranges, known) for x in expression.args))
        if isinstance(made, FloorDiv) and made.args[1].is_Integer and made.args[1] > 0:
            base, divisor = made.args
            remainder = sympy.Dummy("remainder", integer=True)
            ranges[remainder] = ValueRanges(0, divisor - 1)
            made = (base - remainder) / divisor
        known[expression] = made
    return known[expression]
