"""Give every kernel loops that suit the machine: parallel, vectorised, fused into few passes.

Rules are tried in order (`relax_disc.tir_kernels`); a kernel that no rule takes, or on which a
rule fails, stays as it is: slower and right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.analysis.kernels.inplace import INPLACE_ATTRIBUTE, inplace_pairs
from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.analysis.kernels.races import racing
from relax_disc.tir_kernels import rules_for
from relax_disc.tir_kernels.binding import keep_in_buffers
from relax_disc.tir_kernels.vector_math import use_vector_math
from relax_disc.transform.functions import copy_module, is_reshape

_logger = logging.getLogger(__name__)

LOWERING_FAILURES = (
    tvm.error.InternalError,
    s_tir.ScheduleError,
    ValueError,
    TypeError,
    AssertionError,
)
"""What rules, TVM and LLVM raise on a kernel whose schedule makes no code."""


@tvm.transform.module_pass(opt_level=0, name="ScheduleKernels")
class ScheduleKernels:
    """Schedule the kernels of a module for a target.

    Reshapes are left alone, so that `RewriteReshapes` still recognises them.

    Parameters
    ----------
    target : tvm.target.Target, optional
        Default: the target in whose scope the pass runs.
    verify : bool
        Lower all scheduled kernels, and put back those that cannot be.
    rules : sequence, optional
        Default: those of `relax_disc.tir_kernels` for the target.
    """

    def __init__(
        self,
        target: Target | None = None,
        *,
        verify: bool = True,
        rules: Sequence[Any] | None = None,
    ) -> None:
        self.target, self.verify, self.rules = target, verify, rules

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with scheduled kernels."""
        target = self.target or Target.current(allow_none=False)
        rules = rules_for(target) if self.rules is None else self.rules
        result = copy_module(mod)
        scheduled = {
            var: schedule_kernel(func, target, rules, var.name_hint)
            for var, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and not _is_final(func)
        }
        if self.verify:
            scheduled = _without_failures(scheduled, mod, target)
        for var, func in scheduled.items():
            result.update_func(var, func)
        return result


def schedule_kernel(
    func: tirx.PrimFunc, target: Target, rules: Sequence[Any], name: str = "kernel"
) -> tirx.PrimFunc:
    """Schedule one kernel by the first rule that takes it.

    ``rules``: objects with ``apply(func, target, tunable) -> Schedule or None``. Returned: the
    scheduled kernel, or ``func`` without marks.
    """
    func = without_marks(func)
    for rule in rules:
        try:
            schedule = rule.apply(func, target, False)
            if schedule is None:
                continue
            pairs = list(inplace_pairs(func))
            if target.kind.name == "cuda":
                races, overlaid = _races(schedule.mod["main"], target, pairs)
                if races:
                    _logger.warning("threads of %s race by %s", name, type(rule).__name__)
                    continue
                if overlaid:
                    _logger.info("%s: threads would race over operands %s", name, overlaid)
                pairs = [pair for pair in pairs if pair not in overlaid]
        except LOWERING_FAILURES as error:
            _logger.warning("%s failed on %s, kernel kept: %s", type(rule).__name__, name, error)
            continue
        scheduled = schedule.mod["main"]
        if target.kind.name == "llvm":
            scheduled = keep_in_buffers(use_vector_math(scheduled))
        if target.kind.name == "rocm":
            from relax_disc.tir_kernels.cuda.threads import short_indices  # imports dlight

            scheduled = short_indices(scheduled)
        if "global_symbol" not in func.attrs and "global_symbol" in scheduled.attrs:
            scheduled = scheduled.without_attr("global_symbol")
        kept = [list(pair) for pair in pairs]
        return scheduled.with_attrs({"tirx.is_scheduled": True, INPLACE_ATTRIBUTE: kept})
    _logger.info("no schedule rule takes %s", name)
    return func


def _races(
    scheduled: tirx.PrimFunc, target: Target, pairs: list[tuple[int, int]]
) -> tuple[bool, list[tuple[int, int]]]:
    """Ask `racing` of a kernel for a GPU."""
    # dlight takes a second to import, so only where it is needed.
    from relax_disc.tir_kernels.cuda.guarded import lowered_to_loops

    return racing(lowered_to_loops(scheduled, target), pairs)


def without_marks(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Drop the marks that topi's scatters set around statements: LLVM warns of each on stderr."""

    def drop(mark: tirx.AttrStmt, mutator: Any) -> Any:
        if mark.attr_key == "pragma_scope":
            return mutator.mutate(mark.body)
        return mutator.default_mutate(mark)

    body = mutate(func.body, (tirx.AttrStmt, drop))
    return func if body.same_as(func.body) else func.with_body(body)


def _without_failures(
    scheduled: dict[Any, tirx.PrimFunc], mod: tvm.IRModule, target: Target
) -> dict[Any, tirx.PrimFunc]:
    """Put back kernels whose schedule TVM or LLVM cannot lower, which shows only in code."""
    if target.kind.name != "llvm" or _lowers(list(scheduled.values()), target):
        return scheduled
    kept = {}
    for var, func in scheduled.items():
        if not func.same_as(mod[var]) and not _lowers([func], target):
            _logger.warning("the schedule of %s cannot be lowered, kernel kept", var.name_hint)
            func = mod[var]
        kept[var] = func
    return kept


def _lowers(functions: Sequence[tirx.PrimFunc], target: Target) -> bool:
    """Whether code can be made of kernels; without optimisation, which takes most of the time."""
    named = {
        f"kernel{index}": func.with_attr("global_symbol", f"kernel{index}")
        for index, func in enumerate(functions)
    }
    quick = Target({**dict(target.export()), "opt-level": 0})
    try:
        tvm.compile(tvm.IRModule(named), quick)
    except LOWERING_FAILURES as error:
        _logger.debug("lowering: %s", error)
        return False
    return True


def _is_final(func: tirx.PrimFunc) -> bool:
    return bool(func.attrs.get("tirx.is_scheduled", False)) or is_reshape(func)
