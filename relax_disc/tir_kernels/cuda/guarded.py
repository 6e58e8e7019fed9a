"""Wrap a rule of TVM's dlight so that an exception, or an unbound result, means "not mine"."""

from __future__ import annotations

import logging
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.tir_kernels.loops import Scheduled

_logger = logging.getLogger(__name__)

# What dlight's rules raise on kernels that they were not written for.
_NOT_MINE = (
    tvm.error.InternalError,
    s_tir.ScheduleError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Guarded:
    """A dlight rule that never raises and never leaves a loop unbound."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when the rule does not take it or fails on it."""
        try:
            schedule = self.rule.apply(func, target, tunable)
        except _NOT_MINE as error:
            _logger.debug("%s: %s", type(self.rule).__name__, error)
            return None
        if isinstance(schedule, list):
            schedule = schedule[0] if schedule else None
        if schedule is None or not runs_on_device(schedule.mod["main"], target):
            return None
        return schedule


def runs_on_device(func: tirx.PrimFunc, target: Target) -> bool:
    """Whether a kernel reads and writes memory only inside bound threads, by TVM's verifier.

    TVM 0.27 runs its verifier after `FlattenBuffer`, where it finds nothing any more; so here it is
    asked before.
    """
    try:
        lowered = lowered_to_loops(func, target)
    except _NOT_MINE as error:
        _logger.debug("lowering: %s", error)
        return False
    return bool(tirx.analysis.verify_memory(lowered))


def lowered_to_loops(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Lower a scheduled kernel to loops over threads and buffers as they were."""
    module = tvm.IRModule({"main": func.with_attr("target", target)})
    return tvm.transform.Sequential(
        [
            s_tir.transform.CanonicalizeLoop(),
            s_tir.transform.LowerCrossThreadReduction(),
            s_tir.transform.LowerInitBlock(),
            s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
            s_tir.transform.ConvertBlocksToOpaque(),
            s_tir.transform.CompactBufferAllocation(),
            s_tir.transform.UnifyThreadBinding(),
            s_tir.transform.LowerMatchBuffer(),
            s_tir.transform.LowerOpaqueBlock(),
        ]
    )(module)["main"]
