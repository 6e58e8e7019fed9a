"""Give every kernel loops that suit the machine: parallel, vectorised, fused into few passes.

Rules are tried in order (`relax_disc.tir_kernels`); a kernel that no rule takes, or on which a
rule fails, stays as it is: slower and right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.target import Target

from relax_disc.analysis.inplace import INPLACE_ATTRIBUTE, inplace_pairs
from relax_disc.tir_kernels import rules_for
from relax_disc.tir_kernels.vector_math import use_vector_math

_logger = logging.getLogger(__name__)

_FAILURES = (tvm.error.InternalError, s_tir.ScheduleError, ValueError, TypeError, AssertionError)


@tvm.transform.module_pass(opt_level=0, name="ScheduleKernels")
class ScheduleKernels:
    """Schedule the kernels of a module for a target; equal kernels become one.

    Reshapes are left alone, so that `RewriteDataflowReshape` still recognises them.

    Parameters
    ----------
    target : tvm.target.Target, optional
        Default: the target in whose scope the pass runs.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with scheduled kernels."""
        target = self.target or Target.current(allow_none=False)
        rules = rules_for(target)
        merged = _merge_equal_kernels(mod)
        result = tvm.IRModule(merged.functions, attrs=merged.attrs, global_infos=mod.global_infos)
        for var, func in merged.functions.items():
            if isinstance(func, tirx.PrimFunc) and not _is_final(func):
                result.update_func(var, schedule_kernel(func, target, rules, var.name_hint))
        return result


def schedule_kernel(
    func: tirx.PrimFunc, target: Target, rules: Sequence[Any], name: str = "kernel"
) -> tirx.PrimFunc:
    """Schedule one kernel by the first rule that takes it.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        In block form.
    target : tvm.target.Target
        The machine.
    rules : sequence
        Objects with ``apply(func, target, tunable) -> Schedule or None``.
    name : str
        What messages call it.

    Returns
    -------
    tvm.tirx.PrimFunc
        The scheduled kernel, or ``func`` itself.
    """
    for rule in rules:
        try:
            schedule = rule.apply(func, target, False)
        except _FAILURES as error:
            _logger.warning("%s failed on %s, kernel kept: %s", type(rule).__name__, name, error)
            continue
        if schedule is None:
            continue
        scheduled = schedule.mod["main"]
        if target.kind.name == "llvm":
            scheduled = use_vector_math(scheduled)
        if "global_symbol" not in func.attrs and "global_symbol" in scheduled.attrs:
            scheduled = scheduled.without_attr("global_symbol")
        pairs = [list(pair) for pair in inplace_pairs(func)]
        return scheduled.with_attrs({"tirx.is_scheduled": True, INPLACE_ATTRIBUTE: pairs})
    _logger.info("no schedule rule takes %s", name)
    return func


def _is_final(func: tirx.PrimFunc) -> bool:
    return bool(func.attrs.get("tirx.is_scheduled", False)) or relax.analysis.has_reshape_pattern(
        func
    )


def _merge_equal_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    """Let calls of structurally equal private kernels call the first of them."""
    first: dict[Any, Any] = {}
    renamed: dict[Any, Any] = {}
    for var, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and "global_symbol" not in func.attrs:
            kept = first.setdefault(tvm_ffi.StructuralKey(func), var)
            if not kept.same_as(var):
                renamed[var] = kept
    if not renamed:
        return mod
    functions = {}
    for var, func in mod.functions.items():
        if var in renamed:
            continue
        if isinstance(func, relax.Function):
            func = tvm_ffi.structural_mutate(
                func, (tvm.ir.GlobalVar, lambda used, mutator: renamed.get(used, used))
            )
        functions[var] = func
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
