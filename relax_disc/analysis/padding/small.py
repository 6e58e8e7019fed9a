"""Whether a float tensor holds no number that could hide a key, or show one that is hidden.

A bias by position is added to a mask of 0 and the least number.  Made of the model's tables, of
small numbers and of whole ones by the operators below, it is lost beside the least number, and
where the mask is 0 it is no number that hides.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import prim

from relax_disc.analysis.kernels.element import is_guard
from relax_disc.ops import registry

_MOST = 1e4
_KEPT = frozenset(
    f"relax.{name}"
    for name in "add subtract multiply negative permute_dims reshape expand_dims squeeze full "
    "zeros ones broadcast_to astype strided_slice power concat repeat tile arange".split()
)


def is_small(
    expr: Any, definitions: Mapping[Any, Any], tables: Container[Any], module: tvm.IRModule
) -> bool:
    """Whether a tensor is made so; ``tables``: the parameters of the model."""
    waiting, seen = [expr], set[Any]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, relax.Tuple):
            waiting.extend(each.fields)
        if not isinstance(getattr(each, "ty", None), relax.TensorType):
            continue
        if each in seen or not registry.dtype_name(each.ty).startswith("float"):
            continue  # whole numbers are indices, or counts
        seen.add(each)
        bound = definitions.get(each, each) if isinstance(each, relax.Var) else each
        if isinstance(bound, tvm.ir.GenericConst):
            if not numpy.abs(bound.value.numpy()).max(initial=0) <= _MOST:
                return False
        elif isinstance(bound, relax.Var):
            if bound is each and each not in tables:
                return False
            waiting.extend([] if bound is each else [bound])
        elif not isinstance(bound, relax.Call) or not isinstance(bound.op, tvm.ir.Op):
            return False
        elif bound.op.name == "relax.call_tir":
            if not _only_moves(module[bound.args[0]]):
                return False
            waiting.extend(bound.args[1].fields)
        elif bound.op.name in _KEPT:
            waiting.extend(bound.args)
        else:
            return False
    return True


def _only_moves(kernel: Any) -> bool:
    """Whether a kernel reads, adds and multiplies small numbers alone."""
    found: list[bool] = []
    allowed = ("tirx.likely",)

    def see_call(call: Any) -> None:
        found.append(is_guard(call) or getattr(call.op, "name", "") in allowed)

    tvm_ffi.structural_walk(
        kernel.body,
        [
            (prim.FloatImm, lambda number: found.append(abs(float(number.value)) <= _MOST)),
            (tvm.ir.Call, see_call),
            (prim.Div, lambda _: found.append(False)),
        ],
    )
    return all(found)
