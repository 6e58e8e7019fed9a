"""Settings of zero that choose a way which the general one contains: ``if weight_decay != 0``.

Where the way for other values, computed with zero, is the way for zero, only the general one is
compiled, and the setting may change at any call.  This is shown on the recorded values: a factor
that becomes 1 and a term that becomes 0 are dropped, and the rest must be equal.

Limit: what is multiplied by zero is taken to be finite.
"""

from __future__ import annotations

import re
from typing import Any

import sympy

from relax_disc.frontend.optimizer.numbers import Expr
from relax_disc.frontend.optimizer.program import UpdateProgram, Value

_GUARD = re.compile(r"(ne_|eq_)?\((\w+(?:\[\d+\])?)(,| >| <=) 0(?:\.0)?\)")
_INDEX, _NAME, _FUNCTION = (
    re.compile(text) for text in (r"\['?(\w+)'?\]", r"\b[A-Za-z_]\w*", r"\w+(?=\()")
)
_PRODUCTS = ("aten.mul.Tensor", "aten.mul.Scalar")
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor")


def zero_guards(program: UpdateProgram) -> list[tuple[Expr, Expr]]:
    """List the guards that hold because a hyper-parameter is zero, each with that."""
    special = {"ne_,": False, " >": False, "eq_,": True, " <=": True}
    return [
        (expr, found[2])
        for expr, outcome in program.guards.items()
        if (found := _GUARD.fullmatch(expr)) and special.get((found[1] or "") + found[3]) is outcome
    ]


def contains(general: UpdateProgram, special: UpdateProgram, hyper: Expr) -> bool:
    """Say whether one program with a hyper-parameter of zero computes what the other does."""
    if (general.order, general.tensors) != (special.order, special.tensors):
        return False
    canon = _Canon(hyper)
    return canon.describe(general) == canon.describe(special)


class _Canon:
    """Numbers values, equal ones alike, with a hyper-parameter of zero."""

    def __init__(self, hyper: Expr) -> None:
        self._hyper = hyper
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, int] = {}
        self._zero, self._one = self._number("zero"), self._number("one")

    def describe(self, program: UpdateProgram) -> Any:
        """Describe what a program computes."""
        ways = {
            tuple((self._simple(expr), outcome) for expr, outcome in way.path): (
                {key: self._value(value) for key, value in way.outputs.items()},
                {key: self._simple(expr) for key, expr in way.trace.scalars.items()},
                {key: self._simple(expr) for key, expr in way.trace.group.items()},
            )
            for way in program.ways
        }
        created = {key: self._value(value) for key, value in program.created.items()}
        scalars = [(state, self._simple(state.initial)) for state in program.scalars]
        return ways, created, scalars

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _value(self, value: Value) -> int:
        if id(value) not in self._known:
            self._known[id(value)] = self._describe(value)
        return self._known[id(value)]

    def _describe(self, value: Value) -> int:
        if value.op == "entry":
            expr = self._simple(value.args[0])
            if expr in (0, 1):
                return self._one if expr == 1 else self._zero
            return self._number(("entry", expr))
        args = tuple(self._argument(x) for x in value.args)
        if value.op in _PRODUCTS and len(args) == 2:
            if self._zero in args:
                return self._zero
            if self._one in args:
                return args[0] if args[1] == self._one else args[1]
        if value.op in _SUMS and len(args) == 2 and args[1] == self._zero:
            return args[0]
        if value.shape == ():  # numbers of one element are computed in float64 anyway
            if value.op == "aten._to_copy.default":
                return args[0]
            return args[1] if value.op == "aten.copy.default" else self._number((value.op, args))
        return self._number((value.op, args, value.shape, value.dtype))

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Value):
            return self._value(argument)
        if isinstance(argument, tuple):
            return tuple(self._argument(x) for x in argument)
        return (type(argument).__name__, repr(argument))

    def _simple(self, expr: Expr) -> Any:
        """Write an expression in sympy's canonical form."""
        expr, hyper = (_INDEX.sub(r"__\1", text) for text in (expr, self._hyper))
        names: dict[str, Any] = {name: sympy.Symbol(name) for name in _NAME.findall(expr)}
        names |= {name: sympy.Function(name) for name in _FUNCTION.findall(expr)}
        return sympy.sympify(expr, {**names, hyper: sympy.Integer(0)})
