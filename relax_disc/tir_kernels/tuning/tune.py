"""Tune kernels one after the other, and keep in a database what beats the rules."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.stages import is_buffer
from relax_disc.progress import phase
from relax_disc.tir_kernels import rules_for
from relax_disc.tir_kernels.tuning.database import TuningDatabase
from relax_disc.tir_kernels.tuning.judgement import Timing
from relax_disc.tir_kernels.tuning.replay import Tuned
from relax_disc.tir_kernels.tuning.search import Processes, Search, Space, require, search
from relax_disc.tir_kernels.tuning.tasks import Task, operand_shapes
from relax_disc.transform.schedule_kernels import LOWERING_FAILURES, schedule_kernel
from relax_disc.vm_builtins import runtime

_logger = logging.getLogger(__name__)

# Of the fastest candidates, so many are judged: the first may be so by chance.
_FINALISTS = 3
# Kernels are timed on operands of no more than this.
_MOST_BYTES = 512 * 2**20
_VERIFIED_SHAPES = 4
_QUICK_US = 5.0
"""A kernel that takes less is done before tuning could matter."""

BENCHES: dict[str, Callable[[], Processes]] = {"llvm": Processes}
"""What makes and times candidates, by kind of target."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one kernel; ``trace`` is None where the rule stays, ``reason`` says why.

    ``start``: a parameter and its elements, from which on the trace is used; None: always.
    """

    name: str
    space: Space | None
    trace: Any
    start: tuple[int, int] | None
    reason: str
    measured: tuple[Timing, ...]

    def entry(self) -> dict[str, Any]:
        """What a database keeps."""
        found = asdict(self)
        return {"from": found.pop("start"), **found}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to tune at.

    ``shape``: sizes of the step's dims to search at. ``others``: shapes at which a candidate is
    timed as well. ``ranges``: least and greatest sizes, for the shapes at which values are
    compared. ``spaces``: design spaces, in order. ``search``: how to search in each.
    """

    shape: Mapping[str, int]
    others: Sequence[Mapping[str, int]]
    ranges: Mapping[str, tuple[int, int]]
    spaces: tuple[Space, ...] = ("rules",)
    search: Search = field(default_factory=Search)


def tune_kernels(
    tasks: Sequence[Task],
    target: Target,
    plan: Plan,
    database: TuningDatabase,
    path: Path,
    on_verdict: Callable[[Task, Verdict], None] = lambda task, verdict: None,
    *,
    again: bool = False,
) -> TuningDatabase:
    """Tune kernels and write the database after each, so that an interrupted run goes on there.

    ``tasks``: what to tune; kernels that the database knows are passed over, unless ``again``.
    ``target``: the machine's processor, or another of a kind in `BENCHES`. ``plan``: shapes,
    design spaces, trials. ``database``, ``path``: what is known, and the file for it. The
    searches' own records lie beside it. ``on_verdict``: told of each kernel. Returned: the
    database, with an entry for each kernel.
    """
    require(plan.search.cost_model)
    runtime.load()
    processes = BENCHES[target.kind.name]()
    for task in tasks:
        if task.key in database.kernels and not again:
            continue
        folder = path.with_suffix("") / task.key
        with phase(f"tune {task.name}"):
            verdict = tune_kernel(task, target, plan, folder, processes)
        database = database.with_kernel(task.key, verdict.entry())
        database.write(path)
        on_verdict(task, verdict)
    return database


def tune_kernel(
    task: Task, target: Target, plan: Plan, folder: Path, processes: Processes
) -> Verdict:
    """Search for a schedule of one kernel and judge what was found."""
    sizes = task.largest(plan.shape)
    if sizes is None:
        return _kept(task, "its sizes follow from values of the batch")
    if task.bytes(sizes) > _MOST_BYTES:
        return _kept(task, f"it moves {task.bytes(sizes) / 2**20:.0f} MiB at {dict(plan.shape)}")
    rule = schedule_kernel(task.kernel, target, rules_for(target), task.name)
    shapes = _timed_shapes(task, plan)
    own = processes.time_kernels(task.kernel, rule, rule, target, shapes[:1])[0]
    if own.rule_us < _QUICK_US:
        return _kept(task, f"it takes {own.rule_us:.1f} us at {dict(plan.shape)}")
    reasons = []
    measured: tuple[Timing, ...] = ()
    for space in plan.spaces:
        if space == "rules" and not task.tunes:
            reasons.append("its rule has no settings")
            continue
        try:
            found = search(
                task.at(sizes), target, space, task.tunes, folder / space, plan.search, processes
            )
        except LOWERING_FAILURES as error:
            reasons.append(f"{space}: MetaSchedule failed: {_first_line(error)}")
            continue
        reason = "no candidate ran"
        for seconds, trace in found[:_FINALISTS]:
            ratio = seconds * 1e6 / own.rule_us
            if ratio > processes.most_ratio:
                reason = f"{ratio:.2f} of the rule's time, no gain"
                break
            verdict = judge(task, trace, space, rule, target, plan, processes)
            if verdict.trace is not None:
                return verdict
            reason, measured = verdict.reason, verdict.measured or measured
        reasons.append(f"{space}: {reason}")
    return _kept(task, "; ".join(reasons), measured)


def judge(
    task: Task,
    trace: Any,
    space: Space,
    rule: tirx.PrimFunc,
    target: Target,
    plan: Plan,
    bench: Processes,
) -> Verdict:
    """Decide about one trace: replayed for all sizes, right, and faster than the rule."""
    shapes = _timed_shapes(task, plan)
    start: tuple[int, int] | None = None
    while True:
        try:
            decision = {"trace": trace, "from": start}
            alone = Tuned(TuningDatabase({}, {task.key: decision}))
            alone.apply(task.kernel, target)  # or it raises
            candidate = schedule_kernel(task.kernel, target, [alone], task.name)
            sizes = verified_sizes(task, plan, bench.most_verified_bytes)
            wrong = bench.differences(task.kernel, rule, candidate, target, sizes)
        except LOWERING_FAILURES as error:
            reason = f"the trace cannot be replayed for all sizes: {_first_line(error)}"
            return _kept(task, reason)
        if wrong:
            return _kept(task, wrong)
        timings = tuple(bench.time_kernels(task.kernel, rule, candidate, target, shapes))
        slow = [size for timing, (_, size) in zip(timings, shapes, strict=True) if timing.slower]
        if not timings[0].faster or shapes[0][1] in slow:
            return _kept(task, f"{timings[0].ratio:.2f} of the rule's time, no gain", timings)
        if not slow:
            return Verdict(task.name, space, trace, start, "faster than the rule", timings)
        if start is not None:
            return _kept(task, "slower than the rule at some sizes", timings)
        start = _first_good(task, [size for _, size in shapes], slow)
        if start is None:
            return _kept(task, "slower than the rule at larger sizes", timings)


def _first_good(
    task: Task, shapes: list[dict[Any, int]], slow: list[dict[Any, int]]
) -> tuple[int, int] | None:
    """Find the elements of the largest operand from which on no shape is slow.

    Returned: position of the operand among the parameters, and its elements; None: there are none.
    """

    def elements(sizes: dict[Any, int]) -> list[int]:
        return [prod(shape) for _, shape in operand_shapes(task.kernel, sizes)]

    largest = max(range(len(elements(shapes[0]))), key=elements(shapes[0]).__getitem__)
    buffers = [at for at, param in enumerate(task.kernel.params) if is_buffer(param)]
    too_small = max(elements(each)[largest] for each in slow)
    good = [elements(each)[largest] for each in shapes]
    start = min((count for count in good if count > too_small), default=0)
    return (buffers[largest], start) if 0 < start <= good[0] else None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:120]


def _kept(task: Task, reason: str, timings: tuple[Timing, ...] = ()) -> Verdict:
    return Verdict(task.name, None, None, None, reason, timings)


def _timed_shapes(task: Task, plan: Plan) -> list[tuple[Mapping[str, int], dict[Any, int]]]:
    """List the tuned shape, then the others, each with the sizes of the kernel's largest call."""
    found: list[tuple[Mapping[str, int], dict[Any, int]]] = []
    for shape in (plan.shape, *plan.others):
        sizes = task.largest(shape)
        known = [each for _, each in found]
        if sizes is not None and sizes not in known and task.bytes(sizes) <= _MOST_BYTES:
            found.append((shape, sizes))
    return found


def verified_sizes(task: Task, plan: Plan, most_bytes: int) -> list[dict[Any, int]]:
    """Sizes for the comparison of values: the least shape, and random ones of no more bytes."""
    generator = random.Random(task.key)
    least = {name: low for name, (low, _) in plan.ranges.items()}
    shapes = [least]
    for _ in range(20 * _VERIFIED_SHAPES):
        top = {name: min(high, 4 * plan.shape[name]) for name, (_, high) in plan.ranges.items()}
        shapes.append({name: generator.randint(least[name], top[name]) for name in top})
    found: list[dict[Any, int]] = []
    for shape in shapes:
        for sizes in task.sizes(shape):
            if sizes not in found and task.bytes(sizes) <= most_bytes:
                found.append(sizes)
        if len(found) > _VERIFIED_SHAPES:
            break
    return found or [each for each in task.sizes(plan.shape)[:1]]
