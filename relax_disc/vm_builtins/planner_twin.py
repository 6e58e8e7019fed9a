"""The planners in plain Python: the oracle of `src/planner*.cc` and what runs without a compiler.

Results equal those of C++ to the last bit; time is a hundred times longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from relax_disc.vm_builtins.planner_twin_arena import ArenaPlan, Version, plan_arena
from relax_disc.vm_builtins.planner_twin_chain import Chain, chain_styles, lower_bound
from relax_disc.vm_builtins.planner_twin_front_search import FrontSearch
from relax_disc.vm_builtins.planner_twin_model import Model, PlannerGraph
from relax_disc.vm_builtins.planner_twin_timeline import Timeline, Window

__all__ = ["ArenaPlan", "Program", "Version", "plan_arena", "plan_rematerialization"]

UNLIMITED = (1 << 63) // 4 - 1


@dataclass(frozen=True, slots=True)
class Program:
    """A sequence of kernels within a budget; see `Program` in `src/planner/planner.h`.

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


def plan_rematerialization(graph: PlannerGraph, budget: int, effort: int) -> Program:
    """Find the fastest program within a budget; twin of `PlanRematerialization`."""
    model = Model(graph)
    bound = lower_bound(model)
    limit = budget - model.resident_bytes
    best: tuple[int, int, list[Window]] | None = None
    least: int | None = None

    def record(timeline: Timeline) -> None:
        nonlocal best, least
        peak, time = timeline.peak(), timeline.time
        least = peak if least is None else min(least, peak)
        if peak <= limit and (best is None or (time, peak) < best[:2]):
            best = (time, peak, list(timeline.windows))

    def is_worth(time: int | None) -> bool:
        return time is not None and (best is None or time < best[0])

    record(Timeline(model))
    if best is None:
        front = FrontSearch(model, effort, limit)
        front.found = front.search.seen = partial(record, front.search.timeline)
        if is_worth(front.next_time()):
            front.next()
        for style in chain_styles(model, effort):
            if not is_worth(front.bound):
                break
            chain = Chain(model, style, bound)
            chain.search.seen = partial(record, chain.search.timeline)
            while chain.limit > limit and is_worth(chain.time):
                if not chain.descend():
                    break
        while is_worth(front.next_time()):
            front.next()
        if best is None:  # for the report

            def note() -> None:
                nonlocal least
                found = max(front.shown_limit, front.search.timeline.peak())
                least = found if least is None else min(least, found)

            front.found = front.search.seen = note
            front.show_rest()
    whole_bound = bound + model.resident_bytes
    if best is None:
        return Program(False, (), 0, 0, (least or 0) + model.resident_bytes, whole_bound)
    time, peak, windows = best
    timeline = Timeline(model)
    timeline.assign(windows)
    whole_peak = peak + model.resident_bytes
    return Program(True, tuple(timeline.sequence()), whole_peak, time, 0, whole_bound)
