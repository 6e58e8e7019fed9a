"""Write equal extents in one way, so that TVM's fusion recognises them.

Extents that are sums come in several spellings (``1 + s`` from a concatenation, ``s + 1`` from
elsewhere); `FuseTIR` of TVM 0.27 compares them term by term and fails on another order.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.sym.analyzer import Analyzer

from relax_disc.analysis.kernels.mutate import mutate
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
        simpler = analyzer.simplify(expr)
        return expr if tvm_ffi.structural_equal(simpler, expr) else simpler

    for kind in _COMPOSITE:
        function = mutate(function, (kind, simplified))
    return function


def _has_sum(function: Any) -> bool:
    return isinstance(function, tirx.PrimFunc) and any(
        isinstance(extent, _COMPOSITE) for buffer in function.params for extent in _shape(buffer)
    )


def _shape(buffer: Any) -> list[Any]:
    return list(getattr(buffer, "shape", ()))
