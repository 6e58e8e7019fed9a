"""Offsets for buffers with fixed lifetimes, in plain Python; twin of `src/planner/offsets.cc`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from relax_disc.vm_builtins.offsets_twin_search import OffsetProblem, search_offsets
from relax_disc.vm_builtins.planner_twin_model import Random

_SEARCH_WORK = 2_000_000_000
_MINIMIZE_WORK = 30_000_000
_HEIGHTS = 4
_LARGE, _SEARCHABLE, _SMALL = 1200, 3000, 256
_REPAIRS, _REPAIR_WORK, _REPAIR_PATIENCE = 120, 60_000_000, 10


@dataclass(frozen=True, slots=True)
class OffsetEffort:
    """How hard to try.

    Attributes
    ----------
    work : int
        Bound on the work of searches, in buffers looked at.
    tolerance : int
        A height within the lower bound divided by this above it needs no search; 0: none does.
    patience : int
        Rounds without success before repair ends.
    enough : int
        A height that needs none.
    work_per_pair : int
        Where buffers are few: the work of a search for the tolerated height, times the square of
        their number; what it finds does not depend on `enough`.
    """

    work: int
    tolerance: int
    patience: int = 120
    enough: int = 0
    work_per_pair: int = 0


def plan_offsets(
    lower: Sequence[int], upper: Sequence[int], size: Sequence[int], capacity: int
) -> tuple[list[int], int]:
    """Return offsets and the height used; twin of `PlanOffsets` (capacity < 0: make it small)."""
    effort = OffsetEffort(_SEARCH_WORK if capacity >= 0 else _MINIMIZE_WORK, 0)
    return plan_offsets_within(lower, upper, size, capacity, effort)


def plan_offsets_within(
    lower: Sequence[int],
    upper: Sequence[int],
    size: Sequence[int],
    capacity: int,
    effort: OffsetEffort,
) -> tuple[list[int], int]:
    """Return offsets and the height used; twin of `PlanOffsetsWithin`."""
    problem = make_problem(lower, upper, size)
    bound = problem.lower_bound
    spare = bound // effort.tolerance if effort.tolerance and capacity < 0 else 0
    enough = max(capacity, bound + spare, effort.enough)
    best: list[int] = []
    height: int | None = None
    orders = _placement_orders(problem)
    sufficient = max(capacity, bound + (spare // 4 if problem.count > _LARGE else 0))
    for order in orders:
        for smallest in (False, True):
            if height is not None and height <= sufficient:
                break
            placed, reached = _place_in_order(problem, order, smallest)
            if height is None or reached < height:
                height, best = reached, placed
    assert height is not None
    hopeless = 0 <= capacity < bound
    if height > enough and not hopeless and effort.patience:
        target = max(capacity, bound)
        best, height = _repair(problem, orders, target, enough, effort.patience, best, height)
    if height > enough and problem.count <= _SMALL and effort.work_per_pair:
        work = effort.work_per_pair * problem.count**2
        found, _ = search_offsets(problem, bound + spare, work)
        if found is not None:
            best = found
            height = _height(problem, found)
    searches = effort.work > 0 and problem.count <= _SEARCHABLE
    if height > enough and not hopeless and searches:
        target, work = enough, effort.work
        for left in range(1 if capacity >= 0 else _HEIGHTS, 0, -1):
            if target >= height:
                break
            share = work // left
            work -= share
            found, used = search_offsets(problem, target, share)
            if found is not None:
                best = found
                height = _height(problem, found)
                break
            work += share - used
            target += max(1, (height - target) // 2)
    offsets = [0] * len(size)
    for buffer, offset in zip(problem.index, best, strict=True):
        offsets[buffer] = offset
    return offsets, height


def _height(problem: OffsetProblem, offsets: Sequence[int]) -> int:
    return max(o + s for o, s in zip(offsets, problem.size, strict=True))


def make_problem(lower: Sequence[int], upper: Sequence[int], size: Sequence[int]) -> OffsetProblem:
    """Cut time into sections and find what overlaps."""
    index = [i for i in range(len(size)) if size[i] > 0 and lower[i] < upper[i]]
    moments = sorted({m for i in index for m in (lower[i], upper[i])})
    first = [bisect_left(moments, lower[i]) for i in index]
    last = [bisect_left(moments, upper[i]) for i in index]
    sizes = [size[i] for i in index]
    load = [0] * max(0, len(moments) - 1)
    for begin, end, bytes_ in zip(first, last, sizes, strict=True):
        for t in range(begin, end):
            load[t] += bytes_
    overlaps: list[list[int]] = [[] for _ in index]
    alive: list[int] = []
    for i in sorted(range(len(index)), key=lambda i: first[i]):
        alive = [j for j in alive if last[j] > first[i]]
        for j in alive:
            overlaps[i].append(j)
            overlaps[j].append(i)
        alive.append(i)
    return OffsetProblem(index, first, last, sizes, overlaps, load, max(load, default=0))


def _repair(
    problem: OffsetProblem,
    orders: list[list[int]],
    target: int,
    enough: int,
    patience: int,
    best: list[int],
    height: int,
) -> tuple[list[int], int]:
    """Place again and again, moving what ends too high forward in the order."""
    random, order, failed = Random(2), orders[0], 0
    waited = 0
    for _ in range(min(_REPAIRS, _REPAIR_WORK // problem.count**2)):
        if waited >= patience:
            break
        waited += 1
        placed, reached = _place_in_order(problem, order, False)
        failed += 1
        if reached < height:
            height, best, failed, waited = reached, placed, 0, 1
        if height <= enough:
            break
        if failed > _REPAIR_PATIENCE:
            order, failed = orders[random.below(len(orders))], 0
            continue
        low = target + (height - target) // 4 * random.below(4)
        keys = [
            2 * rank * random.below(100) // 100 - 1
            if placed[i] + problem.size[i] > low
            else 2 * rank
            for rank, i in enumerate(order)
        ]
        order = [order[rank] for rank in sorted(range(len(order)), key=keys.__getitem__)]
    return best, height


def _place_in_order(
    problem: OffsetProblem, order: Sequence[int], smallest: bool
) -> tuple[list[int], int]:
    """Put each buffer into the lowest gap that holds it, or into the smallest one."""
    offsets, height = [-1] * problem.count, 0
    for i in order:
        size = problem.size[i]
        busy = sorted(
            (offsets[j], offsets[j] + problem.size[j])
            for j in problem.overlaps[i]
            if offsets[j] >= 0
        )
        end, best, best_gap = 0, -1, None
        for begin, stop in busy:
            gap = begin - end
            if gap >= size and (best_gap is None or gap < best_gap):
                best, best_gap = end, gap
                if not smallest:
                    break
            end = max(end, stop)
        offsets[i] = best if best >= 0 else end
        height = max(height, offsets[i] + size)
    return offsets, height


def _placement_orders(problem: OffsetProblem) -> list[list[int]]:
    """Give the orders to place in, most promising first."""
    width, area, crowd = problem.measures()
    return [
        sorted(range(problem.count), key=lambda i: (-major[i], -problem.size[i]))
        for major in (width, area, problem.size, crowd)
    ]
