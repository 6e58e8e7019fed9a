"""Decide whether TVM can turn an innermost loop into vectors, and where to cut it so that it can.

A condition that differs from lane to lane (the seam of a concatenation) keeps a loop scalar; cut
at the seam, the condition is the same for all lanes of a part.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import tvm
import tvm_ffi
from tvm.ir import prim

from relax_disc.analysis.kernels.element import Element, is_guard, is_short_load
from relax_disc.analysis.kernels.mutate import mutate, walk
from relax_disc.analysis.kernels.stages import Axis, constant, nodes_of
from relax_disc.tir_kernels.vector_math import has_formula

# Functions of which TVM and LLVM make vectors, in all float types, and what is widened anyway.
# They were tried one by one: TVM's mark, `TVectorizable`, is on some that cannot be lowered then.
_VECTOR_CALLS = frozenset(
    f"{space}.{name}"
    for space in ("prim", "tirx")
    for name in (
        "ceil cos exp exp10 exp2 fabs floor if_then_else log log10 log2 pow reinterpret round "
        "sigmoid sin sqrt tan tanh trunc"
    ).split()
)
_COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    prim.LT: operator.lt,
    prim.LE: operator.le,
    prim.GT: operator.gt,
    prim.GE: operator.ge,
}
# A loop is cut into so many parts, each a copy of the body; into more where all copies together
# have no more operations than that.  A concatenation of 24 parts was 21 times as fast in vectors.
_FEW_PARTS, _MOST_OPERATIONS = 4, 256
_ARITHMETIC = (prim.Add, prim.Sub, prim.Mul, prim.Div, prim.Max, prim.Min)


def uses_any(expr: Any, variables: Collection[Any]) -> bool:
    """Whether an expression (or a list of them) uses one of the variables."""

    def stop(found: Any) -> Any:
        return tvm_ffi.VisitInterrupt() if found in variables else None

    return walk(expr, tvm.ir.Var, stop) is not None


def _uses(expr: Any, var: Any) -> bool:
    return uses_any(expr, {var})


def _has_vector_form(call: Any) -> bool:
    return getattr(call.op, "name", "") in _VECTOR_CALLS or has_formula(call)


def vectorizable(expressions: Sequence[Any], var: Any) -> bool:
    """Whether the loop over ``var`` that evaluates ``expressions`` may become vectors."""
    for call in nodes_of(tvm.ir.Call, list(expressions)):
        if not _has_vector_form(call):
            return False
        if is_guard(call) and _uses(call.args[0], var):
            return False
    return _reads_in_vectors(expressions)


def moves_in_vectors(element: Element) -> bool:
    """Whether vectors of an element are written right.

    TVM 0.27 miscounts the lanes of bfloat16 when it converts them, which `FlatBuffers` does
    therefore, from and to float32; LLVM vectorises such loops where it can.
    """
    dtype = str(element.stage.buffer.dtype)
    return dtype != "bfloat16" or str(element.value.ty.dtype) == "float32"


def _reads_in_vectors(expressions: Sequence[Any]) -> bool:
    """Whether vectors of all that expressions read are read right."""
    loads: list[Any] = []
    widened: list[Any] = []

    def note(cast: Any) -> None:
        if is_short_load(cast.value):
            widened.append(cast.value)

    for expr in expressions:
        tvm_ffi.structural_walk(expr, [(tvm.ir.TensorLoad, loads.append), (prim.Cast, note)])
    dtypes = [str(load.source.dtype) for load in loads]
    return dtypes.count("bfloat16") == len(widened)


def segments(expressions: Sequence[Any], inner: Sequence[Axis]) -> list[tuple[int, int]] | None:
    """Cut a constant innermost axis where its conditions change.

    ``expressions``: everything that the loop evaluates. ``inner``: the innermost group; only a
    single axis can be cut. ``parts``: None when the axis is symbolic, the conditions are not
    comparisons with constants, or something else stands against vectors.
    """
    extent = constant(inner[-1].extent)
    if len(inner) != 1 or extent is None:
        return None
    var = inner[-1].var
    seams = {0, extent}
    for call in nodes_of(tvm.ir.Call, list(expressions)):
        if not _has_vector_form(call):
            return None
        if is_guard(call) and _uses(call.args[0], var):
            found = _seams(call.args[0], var)
            if found is None:
                return None
            seams.update(seam for seam in found if 0 < seam < extent)
    parts = list(itertools.pairwise(sorted(seams)))
    is_long = len(parts) > _FEW_PARTS and len(parts) * _operations(expressions) > _MOST_OPERATIONS
    return None if is_long or not _reads_in_vectors(expressions) else parts


def _operations(expressions: Sequence[Any]) -> int:
    """Count what a part writes and computes, indices and guards left out."""
    calls = sum(not is_guard(call) for call in nodes_of(tvm.ir.Call, list(expressions)))
    found = nodes_of(_ARITHMETIC, list(expressions))
    return 1 + calls + sum(str(node.ty) != "int64" for node in found)


def _seams(condition: Any, var: Any) -> list[int] | None:
    """List the values of ``var`` where a conjunction of comparisons may change."""
    if isinstance(condition, (prim.And, prim.Or)):
        left, right = _seams(condition.a, var), _seams(condition.b, var)
        return None if left is None or right is None else left + right
    if not isinstance(condition, tuple(_COMPARISONS)):
        return [] if not _uses(condition, var) else None
    limit = constant(condition.b)
    if limit is not None and condition.a.same_as(var):
        # v < limit and v >= limit change at limit, v <= limit and v > limit after it.
        return [limit if isinstance(condition, (prim.LT, prim.GE)) else limit + 1]
    limit = constant(condition.a)
    if limit is not None and condition.b.same_as(var):
        return [limit if isinstance(condition, (prim.LE, prim.GT)) else limit + 1]
    return None


def part_of(element: Element, var: Any, start: int) -> Element:
    """Return an element inside the part that begins at ``start``: its guards are decided there.

    What stays in a guard is computed by the C library, lane by lane (see `vector_math`).
    """

    def on_call(call: Any, mutator: Any) -> Any:
        holds = _holds(call.args[0], var, start) if is_guard(call) else None
        if holds is None:
            return mutator.default_mutate(call)
        return mutator.mutate(call.args[1 if holds else 2])

    lets = tuple((name, mutate(expr, (tvm.ir.Call, on_call))) for name, expr in element.lets)
    value = mutate(element.value, (tvm.ir.Call, on_call))
    return replace(element, lets=lets, value=value)


def _holds(condition: Any, var: Any, value: int) -> bool | None:
    """Whether a condition holds where ``var`` is a number; None: that does not tell."""
    if isinstance(condition, (prim.And, prim.Or)):
        decisive = isinstance(condition, prim.Or)
        both = [_holds(side, var, value) for side in (condition.a, condition.b)]
        return decisive if decisive in both else None if None in both else not decisive
    compare = _COMPARISONS.get(type(condition))
    if compare is None:
        return None
    left, right = (value if x.same_as(var) else constant(x) for x in (condition.a, condition.b))
    return None if left is None or right is None else compare(left, right)
