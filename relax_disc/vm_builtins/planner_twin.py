"""The planners in plain Python: the oracle of `src/planner*.cc` and what runs without a compiler.

Results equal those of C++ to the last bit; time is a hundred times longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_disc.vm_builtins.offsets_twin import OffsetEffort, plan_offsets_within
from relax_disc.vm_builtins.planner_twin_chain import Chain, chain_styles, lower_bound
from relax_disc.vm_builtins.planner_twin_model import Model, PlannerGraph, PlannerOp
from relax_disc.vm_builtins.planner_twin_timeline import Timeline, Window

UNLIMITED = (1 << 63) // 4 - 1

_PLACEMENT_EFFORT = OffsetEffort(work=0, tolerance=100)


@dataclass(frozen=True, slots=True)
class Program:
    """A sequence of kernels within a budget; see `Program` in `src/planner.h`.

    Attributes
    ----------
    feasible : bool
        Whether one was found; if not, the sequence is empty.
    sequence : tuple of int
        Kernels; a repeat is a recomputation.
    peak_bytes, time_ns : int
        Most live bytes, resident tensors counted, and time.
    least_bytes : int
        Least budget found feasible, where infeasible; else 0.
    lower_bound_bytes : int
        No order-preserving program needs less.
    """

    feasible: bool
    sequence: tuple[int, ...]
    peak_bytes: int
    time_ns: int
    least_bytes: int
    lower_bound_bytes: int


@dataclass(frozen=True, slots=True)
class Version:
    """One copy of a tensor; -1 - k is the workspace of kernel k; positions are inclusive."""

    tensor: int
    created: int
    last_use: int
    offset: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """A program and the places of its tensors; see `ArenaPlan` in `src/planner.h`.

    Attributes
    ----------
    feasible : bool
        Whether one was found; if not, sequence and versions are empty.
    sequence : tuple of int
        Kernels; a repeat is a recomputation.
    versions : tuple of Version
        By creation, then by the order of the kernel's outputs, workspace last.
    arena_bytes, live_peak_bytes, time_ns : int
        Highest end of a version, most live bytes, time.
    least_bytes : int
        Least arena found feasible, where infeasible; else 0.
    lower_bound_bytes : int
        No plan can do with less.
    """

    feasible: bool
    sequence: tuple[int, ...]
    versions: tuple[Version, ...]
    arena_bytes: int
    live_peak_bytes: int
    time_ns: int
    least_bytes: int
    lower_bound_bytes: int


def plan_rematerialization(graph: PlannerGraph, budget: int, effort: int) -> Program:
    """Find the fastest program within a budget; twin of `PlanRematerialization`."""
    model = Model(graph)
    bound = lower_bound(model)
    limit = budget - model.resident_bytes
    best: tuple[int, int, list[Window]] | None = None
    least: int | None = None
    for style in chain_styles(model, effort):
        chain = Chain(model, style, bound)
        timeline = chain.search.timeline

        def record(timeline: Timeline = timeline) -> None:
            nonlocal best, least
            peak, time = timeline.peak(), timeline.time
            least = peak if least is None else min(least, peak)
            if peak <= limit and (best is None or (time, peak) < best[:2]):
                best = (time, peak, list(timeline.windows))

        chain.search.seen = record
        record()
        while chain.limit > limit and (best is None or chain.time < best[0]):
            if not chain.descend():
                break
    whole_bound = bound + model.resident_bytes
    if best is None:
        return Program(False, (), 0, 0, (least or 0) + model.resident_bytes, whole_bound)
    time, peak, windows = best
    timeline = Timeline(model)
    timeline.assign(windows)
    whole_peak = peak + model.resident_bytes
    return Program(True, tuple(timeline.sequence()), whole_peak, time, 0, whole_bound)


def plan_arena(graph: PlannerGraph, budget: int, alignment: int, effort: int) -> ArenaPlan:
    """Find a program and places for its tensors in an arena; twin of `PlanArena`."""
    model = Model(_rounded(graph, alignment))
    model.resident_bytes = 0
    bound = lower_bound(model)
    best: ArenaPlan | None = None
    tried: ArenaPlan | None = None
    least: int | None = None
    for style in chain_styles(model, effort):
        if best and model.base_time >= best.time_ns:
            break
        chain = Chain(model, style, bound)
        timeline = chain.search.timeline
        more = True
        while more and not (best and chain.time >= best.time_ns):
            if timeline.peak() <= budget and not (
                tried and tried.sequence == tuple(timeline.sequence())
            ):
                tried = _place(model, timeline, bound)
                least = tried.arena_bytes if least is None else min(least, tried.arena_bytes)
                if tried.arena_bytes <= budget:
                    best = tried
                    break
            more = chain.descend()
        if more or best:
            continue
        tried = _place(model, timeline, bound)
        least = tried.arena_bytes if least is None else min(least, tried.arena_bytes)
    return best or ArenaPlan(False, (), (), 0, 0, 0, least or 0, bound)


def _rounded(graph: PlannerGraph, alignment: int) -> PlannerGraph:
    def rounded(size: int) -> int:
        return (size + alignment - 1) // alignment * alignment

    ops = tuple(
        PlannerOp(
            op.time_ns,
            op.rerun_ns,
            rounded(op.workspace),
            op.inputs,
            op.outputs,
            op.inplace,
            op.recomputable,
        )
        for op in graph.ops
    )
    sizes = tuple(rounded(size) for size in graph.sizes)
    return PlannerGraph(sizes, graph.resident, graph.is_output, ops)


def _place(model: Model, timeline: Timeline, bound: int) -> ArenaPlan:
    """Give the timeline's program and its tensors their places."""
    lives, buffer_of, lower, upper, size = _collect_buffers(model, timeline)
    offsets, height = plan_offsets_within(lower, upper, size, -1, _PLACEMENT_EFFORT)
    versions = tuple(
        Version(tensor, created, last_use, offsets[buffer])
        for (tensor, created, last_use), buffer in zip(lives, buffer_of, strict=True)
    )
    sequence, peak = tuple(timeline.sequence()), max(0, timeline.peak())
    return ArenaPlan(True, sequence, versions, height, peak, timeline.time, 0, bound)


def _collect_buffers(
    model: Model, timeline: Timeline
) -> tuple[list[list[int]], list[int], list[int], list[int], list[int]]:
    """Versions, their buffers, and the buffers' lifetimes and sizes; twin of `CollectBuffers`."""
    lives: list[list[int]] = []  # tensor, created, last use
    current: dict[int, int] = {}
    sequence = timeline.sequence()
    for position, op in enumerate(sequence):
        for tensor in model.inputs[op]:
            lives[current[tensor]][2] = position
        for tensor in model.outputs[op]:
            current[tensor] = len(lives)
            lives.append([tensor, position, position])
        if model.workspace[op] > 0:
            lives.append([-1 - op, position, position])
    for tensor in model.inputs[model.ops]:
        lives[current[tensor]][2] = len(sequence)

    current.clear()
    buffer_of: list[int] = []
    lower: list[int] = []
    upper: list[int] = []
    size: list[int] = []
    for position, op in enumerate(sequence):
        shares = {
            target: buffer_of[current[source]]
            for source, target in model.shared_pairs(
                op, lambda t, p=position: lives[current[t]][2] == p
            )
        }
        while len(buffer_of) < len(lives) and lives[len(buffer_of)][1] == position:
            tensor, created, last_use = lives[len(buffer_of)]
            if tensor >= 0:
                current[tensor] = len(buffer_of)
            if tensor in shares:
                buffer_of.append(shares[tensor])
                upper[shares[tensor]] = last_use + 1
                continue
            buffer_of.append(len(size))
            lower.append(created)
            upper.append(last_use + 1)
            size.append(model.sizes[tensor] if tensor >= 0 else model.workspace[-1 - tensor])
    return lives, buffer_of, lower, upper, size
