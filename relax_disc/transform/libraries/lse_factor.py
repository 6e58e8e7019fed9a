"""Recognise what a loss adds for large normalisers, such as ``z * logsumexp(logits)**2``.

The gradient of such a term by the log-sum-exp ``lse`` of a row is a factor times ``lse``.  A factor
that is known before the logits lets both be computed in one pass over the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from relax_disc.ops.operand_views import Uses, extents_of, is_call_of, operands_of
from relax_disc.transform.simplify.rules import scalar

_MOVES = ("relax.reshape", "relax.expand_dims", "relax.squeeze")


@dataclass(frozen=True, slots=True)
class LseTerm:
    """The log-sum-exp that a loss reads besides the cross-entropy, and its gradient."""

    lse: relax.Var  # ``[N]``, of the logits
    backward: relax.Var  # the gradient of the logits by way of ``lse``
    factor: relax.Expr  # ``[N]``; times ``lse`` it is the gradient of the loss by ``lse``


def lse_term(backward: relax.Var, logits: relax.Expr, uses: Uses) -> LseTerm | None:
    """Read ``backward`` as the gradient of such a term; None where it is none, or not linear."""
    call = uses.definitions.get(backward)
    if not is_call_of(call, "relax_disc.logsumexp_backward") or not call.args[1].same_as(logits):
        return None
    gradient, _, lse = call.args
    known = uses.definitions.get(lse) if isinstance(lse, relax.Var) else None
    if not is_call_of(known, "relax_disc.logsumexp") or not known.args[0].same_as(logits):
        return None
    factor = _factor(gradient, lse, uses)
    if factor is None:
        return None
    return LseTerm(lse, backward, _shaped(factor, extents_of(lse)))


def _factor(expr: relax.Expr, lse: relax.Expr, uses: Uses) -> relax.Expr | None:
    """What ``expr`` is ``lse`` times, of a shape that broadcasts to that of ``expr``."""
    if expr.same_as(lse):
        return relax.const(1.0, "float32")
    value = uses.definitions.get(expr) if isinstance(expr, relax.Var) else expr
    if not isinstance(value, relax.Call):
        return None
    if any(is_call_of(value, name) for name in _MOVES):
        inner = _factor(value.args[0], lse, uses)
        if inner is None or scalar(inner) is not None:
            return inner
        whole = _shaped(inner, extents_of(value.args[0]))
        return relax.op.reshape(whole, extents_of(expr))
    if is_call_of(value, "relax.multiply"):
        for part, other in (value.args, tuple(reversed(value.args))):
            inner = _factor(part, lse, uses)
            if inner is not None:
                return other if scalar(inner) == 1.0 else relax.op.multiply(inner, other)
    if is_call_of(value, "relax.divide"):
        inner = _factor(value.args[0], lse, uses)
        return None if inner is None else relax.op.divide(inner, value.args[1])
    if is_call_of(value, "relax.where") and scalar(value.args[2]) == 0.0:
        inner = _factor(value.args[1], lse, uses)
        return None if inner is None else relax.op.where(value.args[0], inner, value.args[2])
    return None


def _shaped(expr: relax.Expr, shape: Sequence[tvm.ir.Expr]) -> relax.Expr:
    return relax.op.broadcast_to(expr, list(shape))


def late_definitions(
    wanted: Iterable[relax.Expr], place: relax.Var, order: dict[relax.Var, int], uses: Uses
) -> tuple[relax.Var, ...] | None:
    """List what has to be computed earlier so that `wanted` is known at a place.

    ``wanted``: what is read there. ``place``: the binding before which all must be known. Returned:
    bindings to move before `place`, in their order; None when one of them needs what `place`
    computes, or is not known to be pure.
    """
    late: set[relax.Var] = set()
    pending = [variable for expr in wanted for variable in operands_of(expr)]
    while pending:
        variable = pending.pop()
        if order.get(variable, -1) < order[place] or variable in late:
            continue
        value = uses.definitions[variable]
        if variable.same_as(place) or not _is_movable(variable, value):
            return None
        late.add(variable)
        pending += operands_of(value)
    return tuple(sorted(late, key=order.__getitem__))


def _is_movable(variable: relax.Var, value: relax.Expr) -> bool:
    if not isinstance(variable, relax.DataflowVar):
        return False
    plain = (relax.TupleGetItem, relax.Var, tvm.ir.GenericConst, relax.ShapeExpr)
    return isinstance(value, (relax.Call, *plain))
