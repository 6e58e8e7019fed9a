"""Whether what is computed of a tensor tells its least elements from 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from relax_disc.analysis.kernels.mutate import walk

Users = Callable[[relax.Var], Iterable[tuple[relax.Var | None, relax.Expr]]]
"""From a variable to what uses it: the variable that is bound, or None for the result, and how."""

_ADDS = frozenset(f"relax.{name}" for name in ("add", "subtract", "sum", "mean", "matmul"))
"""Operators behind which an element is one of several terms."""

_MOVES = frozenset(
    f"relax.{name}"
    for name in (
        "multiply divide negative where astype reshape permute_dims broadcast_to expand_dims"
        " squeeze concat split strided_slice take"
    ).split()
)
"""Operators that an element passes by itself, in proportion."""


def is_told_from_zero(variable: relax.Var, users_of: Users, mod: tvm.IRModule) -> bool:
    """Whether a program does more with a tensor's elements than to scale, move and add them up.

    It may return them, divide by them, compare or order them, or take a logarithm.  Behind a sum
    only logarithms count: the sum may be of little alone.  An operator of PyTorch's counts as one;
    of our own libraries none takes a logarithm of what it is given.
    """
    seen: set[tuple[relax.Var, bool]] = set()
    left = [(variable, True)]  # and whether nothing has been added to its elements
    while left:
        found = left.pop()
        if found in seen:
            continue
        seen.add(found)
        at, is_alone = found
        for user, value in users_of(at):
            name = str(getattr(getattr(value, "op", None), "name", ""))
            is_alias = isinstance(value, relax.Var | relax.TupleGetItem)
            is_passed = name in _MOVES | _ADDS or (is_alias and user is not None)
            is_divisor = name == "relax.divide" and value.args[1].same_as(at)
            if (is_alone and (is_divisor or not is_passed)) or _may_take_logarithms(
                name, value, mod
            ):
                return True
            if user is not None:
                left.append((user, is_alone and name not in _ADDS))
    return False


def _may_take_logarithms(name: str, value: Any, mod: tvm.IRModule) -> bool:
    if name == "relax.call_dps_packed":
        return str(value.args[0].global_symbol).startswith("relax_disc.aten.")
    if name != "relax.call_tir":
        return name == "relax.log"

    def stop(call: Any) -> Any:
        operator = str(getattr(call.op, "name", "")).rpartition(".")[2]
        return tvm_ffi.VisitInterrupt() if operator.startswith("log") else None

    return walk(mod[value.args[0]].body, tvm.ir.Call, stop) is not None
