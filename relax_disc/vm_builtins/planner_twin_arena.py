"""Programs and places for their tensors in an arena; twin of `src/planner/arena.cc`."""

from __future__ import annotations

from dataclasses import dataclass

from relax_disc.vm_builtins.offsets_twin import OffsetEffort, plan_offsets_within
from relax_disc.vm_builtins.planner_twin_chain import Chain, ChainStyle, chain_styles, lower_bound
from relax_disc.vm_builtins.planner_twin_front_search import FrontSearch
from relax_disc.vm_builtins.planner_twin_model import Model, PlannerGraph, PlannerOp
from relax_disc.vm_builtins.planner_twin_timeline import Timeline, Window

_TOLERANCE = 100
_PATIENCE, _SHORT_PATIENCE = 120, 24
_WORK_PER_PAIR = 10


@dataclass(frozen=True, slots=True)
class Version:
    """One copy of a tensor; -1 - k is the workspace of kernel k; positions are inclusive."""

    tensor: int
    created: int
    last_use: int
    offset: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """A program and the places of its tensors; see `ArenaPlan` in `src/planner/planner.h`.

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


def plan_arena(graph: PlannerGraph, budget: int, alignment: int, effort: int) -> ArenaPlan:
    """Find a program and places for its tensors in an arena; twin of `PlanArena`."""
    model = Model(_rounded(graph, alignment))
    model.resident_bytes = 0
    return _ArenaSearch(model, budget, effort).run()


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


def _patience(front: FrontSearch) -> int:
    return _SHORT_PATIENCE if front.shows_rung else 0


def _effort(patience: int, enough: int) -> OffsetEffort:
    searches = _WORK_PER_PAIR if patience == _PATIENCE else 0
    return OffsetEffort(0, _TOLERANCE, patience, enough, searches)


@dataclass(slots=True)
class _Descent:
    """A chain, made when its turn comes; whether its program was refused; its time, None: ended."""

    style: ChainStyle
    time: int | None
    chain: Chain | None = None
    refused: bool = False


class _ArenaSearch:
    """Finds the fastest program that the arena holds.

    Each source of programs knows a least time of those that it has not given yet; the source with
    the least goes on, and so the first program that fits is the fastest.
    """

    def __init__(self, model: Model, budget: int, effort: int) -> None:
        self._model, self._budget, self._effort = model, budget, effort
        self._bound = lower_bound(model)
        self._plan: ArenaPlan | None = None  # the program placed last
        self._patience = 0
        self._least: int | None = None
        self._front: FrontSearch | None = None
        self._programs: list[tuple[int, list[Window], int]] = []
        self._descents: list[_Descent] = []

    def run(self) -> ArenaPlan:
        """Return the plan, or what is known where there is none."""
        if self._search():
            assert self._plan is not None
            return self._plan
        self._find_least()
        return ArenaPlan(False, (), (), 0, 0, 0, self._least or 0, self._bound)

    def _find_least(self) -> None:
        """Find the least arena that other programs of the sources need."""
        front = self._front
        assert front is not None

        def note(timeline: Timeline, patience: int, at_least: int) -> None:
            if self._least is not None and max(timeline.peak(), at_least) >= self._least:
                return
            _, _, lower, upper, size = collect_buffers(self._model, timeline)
            effort = _effort(patience, 0)
            height = plan_offsets_within(lower, upper, size, -1, effort)[1]
            self._note(max(height, at_least))

        for descent in self._descents:
            assert descent.chain is not None
            note(descent.chain.search.timeline, _PATIENCE, 0)
        front.found = lambda: note(front.search.timeline, _patience(front), front.shown_limit)
        front.show_rest()

    def _note(self, arena_bytes: int) -> None:
        least = self._least
        self._least = arena_bytes if least is None else min(least, arena_bytes)

    def _search(self) -> bool:
        if self._fits(Timeline(self._model), _PATIENCE):
            return True
        self._front = front = FrontSearch(self._model, self._effort, self._budget)
        timeline = front.search.timeline

        def found() -> None:
            if timeline.peak() <= self._budget:
                self._programs.append((timeline.time, list(timeline.windows), _patience(front)))

        front.found = found
        first = max(self._model.base_time, front.bound)
        styles = chain_styles(self._model, self._effort)
        self._descents = [_Descent(style, first) for style in styles]
        while True:
            times = [front.next_time(), *(descent.time for descent in self._descents)]
            time = min((t for t in times if t is not None), default=None)
            waiting = min((program[0] for program in self._programs), default=None)
            if waiting is not None and (time is None or waiting <= time):
                at = next(i for i, p in enumerate(self._programs) if p[0] == waiting)
                _, windows, patience = self._programs.pop(at)
                timeline.assign(windows)
                if self._fits(timeline, patience):
                    return True
            elif time is None:
                return False
            elif front.next_time() == time:
                front.next()
            elif self._go_down(next(d for d in self._descents if d.time == time)):
                return True

    def _go_down(self, descent: _Descent) -> bool:
        """Place a chain's program; where that does not fit, go down a rung."""
        if descent.chain is None:
            descent.chain = Chain(self._model, descent.style, self._bound)
            descent.refused = True  # the program without recomputation
        chain = descent.chain
        if not descent.refused:
            if self._fits(chain.search.timeline, _PATIENCE):
                return True
            descent.refused = True
        descent.time = chain.time if chain.descend() else None
        descent.refused = chain.search.timeline.peak() > self._budget
        return False

    def _fits(self, timeline: Timeline, patience: int) -> bool:
        """Place a program's tensors; return whether they fit."""
        if timeline.peak() > self._budget:
            return False
        sequence, plan = tuple(timeline.sequence()), self._plan
        if plan is not None and self._patience >= patience and plan.sequence == sequence:
            return plan.arena_bytes <= self._budget
        enough = self._budget if timeline.time > self._model.base_time else 0
        lives, buffer_of, lower, upper, size = collect_buffers(self._model, timeline)
        effort = _effort(patience, enough)
        offsets, height = plan_offsets_within(lower, upper, size, -1, effort)
        versions = tuple(
            Version(tensor, created, last_use, offsets[buffer])
            for (tensor, created, last_use), buffer in zip(lives, buffer_of, strict=True)
        )
        peak = max(0, timeline.peak())
        self._plan = ArenaPlan(
            True, sequence, versions, height, peak, timeline.time, 0, self._bound
        )
        self._patience = patience
        self._note(height)
        return height <= self._budget


def collect_buffers(
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
