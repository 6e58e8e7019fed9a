"""Write equal extents in one way, so that TVM's fusion recognises them.

Extents that are sums come in several spellings (``1 + s`` from a concatenation, ``s + 1`` from
elsewhere); `FuseTIR` of TVM 0.27 compares them term by term and fails on another order.  Of
``(t + 1) // 2 + t // 2``, whose order TVM's simplification leaves alone, it takes ``t`` to be
``t + 1``, and again, until the stack ends.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.sym.analyzer import Analyzer

from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.analysis.kernels.stages import constant
from relax_disc.transform.functions import copy_module

_COMPOSITE = (tirx.Add, tirx.Sub, tirx.Mul)


@tvm.transform.module_pass(opt_level=0, name="CanonicalizeExtents")
class CanonicalizeExtents:
    """Simplify the integer sums in kernels and types into TVM's own order of terms."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite every function in which an extent is a sum."""
        del ctx
        result = copy_module(mod)
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function) or _has_sum(function):
                result.update_func(variable, with_simple_extents(function))
        return result


def with_simple_extents(function: Any) -> Any:
    """Simplify the integer sums of one kernel, or those in the types of one Relax function."""
    analyzer = Analyzer()

    def simplified(expr: Any, mutator: Any) -> Any:
        # What lies below as well: a load of a float, of a buffer that has become another one.
        expr = mutator.default_mutate(expr)
        if str(expr.ty) != "int64":
            return expr
        # The same object where nothing changes: another one would make another buffer of it.
        simpler = _in_order(analyzer.simplify(expr))
        return expr if tvm_ffi.structural_equal(simpler, expr) else simpler

    for kind in _COMPOSITE:
        function = mutate(function, (kind, simplified))
    return function


def _in_order(expr: Any) -> Any:
    """Sort the terms of a sum of quotients; numbers come last, as TVM has them."""
    terms = list(_terms(expr))
    if sum(isinstance(term, tirx.FloorDiv) for term in terms) < 2:
        return expr
    terms.sort(key=lambda term: (constant(term) is not None, str(term)))
    return functools.reduce(operator.add, terms)


def _terms(total: Any) -> Iterator[Any]:
    if isinstance(total, tirx.Add):
        yield from _terms(total.a)
        yield from _terms(total.b)
    else:
        yield total


def _has_sum(function: Any) -> bool:
    return isinstance(function, tirx.PrimFunc) and any(
        isinstance(extent, _COMPOSITE) for buffer in function.params for extent in _shape(buffer)
    )


def _shape(buffer: Any) -> list[Any]:
    return list(getattr(buffer, "shape", ()))
