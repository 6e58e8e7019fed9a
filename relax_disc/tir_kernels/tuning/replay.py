"""Turn a trace that MetaSchedule found at fixed sizes into a schedule for all sizes.

There are two kinds of traces.  Those of our own design space hold decisions for the numbers of a
rule (`Settings`), which the rule takes at any size.  Those of TVM's design space are replayed on
the symbolic kernel with their decisions: an axis is split by the same inner factors, and as often
as is needed outside; where that leaves a rest, TVM guards it by a condition.  A sum over a
symbolic extent may not be cut into partial sums (`rfactor`): TVM 0.27 loses the condition then, and
reads past the end.

A trace that is better from some size on only is one branch of the kernel; the rule's is the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.analysis.kernels.stages import constant, nodes_of
from relax_disc.tir_kernels import rules_for
from relax_disc.tir_kernels.cpu import cpu_rules
from relax_disc.tir_kernels.flat import index_const, product
from relax_disc.tir_kernels.loops import Settings, with_body
from relax_disc.tir_kernels.tuning.database import TuningDatabase, kernel_key

ANNOTATION = "relax_disc.settings."
"""Begin of the names under which a trace of our design space leaves its decisions."""


class Tuned:
    """Schedule rule for the kernels of a database; tried before the rules that it beat."""

    def __init__(self, database: TuningDatabase) -> None:
        self._decisions = database.decisions()

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool = False
    ) -> s_tir.Schedule | None:
        """Return the kernel by its trace, or None where the database has none."""
        found = self._decisions.get(kernel_key(func)) if self._decisions else None
        if found is None:
            return None
        schedule = replay(func, found["trace"], target)
        if found["from"] is None:
            return schedule
        return _from_size_on(schedule, func, target, *found["from"])


def replay(func: tirx.PrimFunc, trace: Any, target: Target) -> s_tir.Schedule | None:
    """Schedule a kernel, symbolic or not, by a trace as JSON.

    Raises `ValueError`, or what TVM raises: the trace cannot be replayed on this kernel.
    """
    if any(kind == "RFactor" for kind, *_ in trace[0]) and _sums_symbolic_extents(func):
        raise ValueError("a sum over a symbolic extent is cut into partial sums")
    schedule = s_tir.Schedule(func)
    s_tir.Trace.apply_json_to_schedule(without_perfect_tiles(trace), schedule)
    found = by_settings(schedule.mod["main"], func, target)
    return found or schedule


def _sums_symbolic_extents(func: tirx.PrimFunc) -> bool:
    axes = (axis for block in nodes_of(s_tir.SBlock, func.body) for axis in block.iter_vars)
    reduced = [axis for axis in axes if axis.iter_type == tirx.IterVar.CommReduce]
    return any(constant(axis.dom.extent) is None for axis in reduced)


def by_settings(
    annotated: tirx.PrimFunc, func: tirx.PrimFunc, target: Target
) -> s_tir.Schedule | None:
    """Schedule a kernel by the rules with the settings that stand at the root of `annotated`."""
    found = settings_of(annotated)
    return None if found is None else by_rule_with(func, target, found)


def _from_size_on(
    schedule: s_tir.Schedule, func: tirx.PrimFunc, target: Target, parameter: int, elements: int
) -> s_tir.Schedule:
    """Take a schedule where a parameter has so many elements, the rule's where it has fewer."""
    plain = _first(rules_for(target), func, target)
    large, small = (each.mod["main"].body.block for each in (schedule, plain))
    count = product(func.params[parameter].shape)
    choice = tirx.IfThenElse(count >= index_const(elements), large.body, small.body)
    return with_body(func, [choice], [*large.alloc_buffers, *small.alloc_buffers])


def by_rule_with(func: tirx.PrimFunc, target: Target, settings: Settings) -> s_tir.Schedule:
    """Schedule a kernel by the first rule that takes it, with settings."""
    return _first(cpu_rules(settings), func, target)


def _first(rules: Sequence[Any], func: tirx.PrimFunc, target: Target) -> s_tir.Schedule:
    schedules = (rule.apply(func, target, False) for rule in rules)
    return next(schedule for schedule in schedules if schedule is not None)


def settings_of(func: tirx.PrimFunc) -> Settings | None:
    """Read the settings that a trace of our design space left; None: it is of TVM's."""
    body: Any = func.body
    if not isinstance(body, s_tir.SBlockRealize):
        return None
    names = {field.name for field in fields(Settings)}
    marks = {
        str(name)[len(ANNOTATION) :]: int(value)
        for name, value in body.block.annotations.items()
        if str(name).startswith(ANNOTATION)
    }
    return Settings(**marks) if marks and set(marks) <= names else None


def without_perfect_tiles(trace: Any) -> list[Any]:
    """Write decided factors into the splits of a trace, the outermost left open.

    Only sizes known while compiling have factors without a rest.
    """
    instructions, decisions = trace
    decided = {int(at): decision for at, decision in decisions}
    factors: dict[str, Any] = {}
    kept: list[Any] = []
    moved: list[Any] = []
    for at, (kind, inputs, attributes, outputs) in enumerate(instructions):
        if kind == "SamplePerfectTile":
            factors.update(zip(outputs, [None, *decided[at][1:]], strict=True))
            continue
        if at in decided:
            moved.append([len(kept), decided[at]])
        known = [factors.get(x, x) if isinstance(x, str) else x for x in inputs]
        kept.append([kind, known, attributes, outputs])
    return [kept, moved]


def plain(value: Any) -> Any:
    """Convert what TVM calls JSON (its own arrays and numbers) to Python's."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tvm.ir.prim.IntImm):
        return int(value.value)
    if isinstance(value, tvm.ir.prim.FloatImm):
        return float(value.value)
    if hasattr(value, "items"):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value]
