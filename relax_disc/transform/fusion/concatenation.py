"""Kernels that join many tensors: which of them holds an element is found by halves.

TVM's kernels ask one tensor after the other, in conditions nested as deep as there are tensors.  A
global norm joins a number of every parameter: what walks such an expression, here and in TVM, goes
down once a parameter, and a stack of 8 MB was not enough for 200.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from tvm import relax, te, tirx

_FEW = 32
"""Tensors that TVM's own kernels join; their conditions are cut into loops of vectors."""

Rule = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def joining_rules(rules: dict[str, Rule]) -> dict[str, Rule]:
    """Return the rules for ``relax.concat`` and ``relax.stack``, which ask ``rules`` for few."""
    makers = {"relax.concat": _concatenate, "relax.stack": _stack}
    return {name: _for_many(rules[name], makers[name]) for name in makers.keys() & rules.keys()}


def _for_many(rule: Rule, make: Callable[..., Any]) -> Rule:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        tensors: Any = call.args[0]
        if not isinstance(tensors, relax.Tuple) or len(tensors.fields) <= _FEW:
            return rule(builder, call)
        attributes: Any = call.attrs
        axis = 0 if attributes.axis is None else int(attributes.axis)
        result: Any = call.ty
        return builder.call_te(make, list(tensors.fields), axis % len(result.shape.values))

    return legalize


def _concatenate(tensors: Sequence[Any], axis: int) -> Any:
    starts = list(accumulate((x.shape[axis] for x in tensors), initial=tirx.const(0, "int64")))

    def read(k: int, at: list[Any]) -> Any:
        return tensors[k](*at[:axis], at[axis] - starts[k], *at[axis + 1 :])

    shape = list(tensors[0].shape)
    shape[axis] = starts[-1]
    return _by_halves(shape, axis, starts, read, "T_concat")


def _stack(tensors: Sequence[Any], axis: int) -> Any:
    def read(k: int, at: list[Any]) -> Any:
        return tensors[k](*at[:axis], *at[axis + 1 :])

    shape = list(tensors[0].shape)
    shape.insert(axis, len(tensors))
    starts = [tirx.const(k, "int64") for k in range(len(tensors) + 1)]
    return _by_halves(shape, axis, starts, read, "T_stack")


def _by_halves(
    shape: list[Any],
    axis: int,
    starts: Sequence[Any],
    read: Callable[[int, list[Any]], Any],
    name: str,
) -> Any:
    """Compute a tensor whose part from ``starts[k]`` on along ``axis`` is read from tensor k."""

    def chosen(first: int, last: int, at: list[Any]) -> Any:
        if last - first == 1:
            return read(first, at)
        middle = (first + last) // 2
        left, right = chosen(first, middle, at), chosen(middle, last, at)
        return tirx.if_then_else(at[axis] < starts[middle], left, right)

    return te.compute(
        shape, lambda *at: chosen(0, len(starts) - 1, list(at)), name=name, tag="injective"
    )
