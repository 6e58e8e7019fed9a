"""Minimise the peak of live memory over the legal orders, and bound it from below.

The method.  While op i runs, what is live is no less than one minimum cut (see `min_cut`), in any
order.  So the cut at the op where an order peaks either equals the peak, and then the order is
optimal, or its two sides say which ops to run before i and after i to do better there.  Each side
is a problem of the same kind: solve it, starting from list schedules in both directions and a
depth-first order, and join.  Where a side cannot be brought below the peak, the op that blocks it
is forced to the other side of the cut, and the cut is made anew.

On large irregular graphs one bad split high up spoils everything below.  So where splitting ends
the order is improved in windows: the steps around the peak are a problem of the same kind too, and
whatever order they get, the steps outside are not affected.  Windows grow from 17 steps to the
whole program; where none helps the whole is split again.

At last the bound is raised: by cuts at more ops, and by edges that every better order has
(`schedule_probe`).

Sizes are known at several points; the peak to be minimised is the greatest over the points.

Work is counted in arcs looked at, and limited: the same limit gives the same order on any machine.
`vm_builtins/src/schedule/split.cc` is the same in C++, with equal results; it is used where the
native library is there.

Limits: the bound is of each op alone, and is weak on graphs without structure.  Nothing guarantees
an optimum, but is_optimal is a proof: the bound equals the peak.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from relax_disc.analysis.schedule.limit import WorkLimit
from relax_disc.analysis.schedule.min_cut import Cut, Side, least_cut
from relax_disc.analysis.schedule.native import native_split, split_natively
from relax_disc.analysis.schedule.probe import forced_pairs, tightened
from relax_disc.analysis.schedule.problem import (
    ScheduleProblem,
    live_during,
    part_of,
    peak_of,
)
from relax_disc.analysis.schedule.rules import depth_first_order, level_order, list_order

_MAX_DEPTH = 12  # of nested splits
_MAX_ROUNDS = 12  # splits of one part, one after the other
_DEEP = 3  # depth from which a split is tried once only
_TRIES = 8  # splits tried at one op above that
_FIRST_REACH = 8  # steps of the first window on either side of the peak
_FIRST_SHARE = 8  # part of the work that splitting alone may use at first
_BOUND_SHARE = 8  # part of the work left that raising the bound may use
_PROOF_SHARE = 4  # part of the work left that a proof may use
_PROOF_ROUNDS = 6  # of finding edges
_SPLIT_SHARE = 4  # part of the work left that one split of the whole may use
# How hard a window is searched: part of the work left that it may use, and as at which depth.
_EFFORTS = ((64, 3), (16, 2))


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes
    ----------
    order : list of int
        The best order found.
    peak : int
        Its greatest peak over the points.
    bound : int
        No order's greatest peak is smaller.
    work : int
        Arcs looked at.
    timed_out : bool
        Whether the time limit ended the search: then another run may end elsewhere.
    """

    order: list[int]
    peak: int
    bound: int
    work: int
    timed_out: bool


def split_search(
    problem: ScheduleProblem,
    starts: Sequence[Sequence[int]] = (),
    *,
    target: int = 0,
    work: int,
    seconds: float,
    native: bool = True,
) -> Found:
    """Minimise the greatest peak over the points.

    Parameters
    ----------
    problem : ScheduleProblem
        What to order.  Its own order is one of the starts.
    starts : sequence of orders
        Legal orders to start from, beside the seeds.
    target : int
        A peak that is good enough.
    work : int
        Limit of the work.
    seconds : float
        Limit of the time, as a last resort.
    native : bool
        Use the C++ search where it is there.
    """
    function = native_split() if native else None
    if function is not None:
        return Found(*split_natively(function, problem, starts, target, work, seconds))
    limit = WorkLimit(work, time.monotonic() + seconds)
    solved = _Search(limit).solve(problem, target, 0, starts)
    return Found(solved.order, solved.peak, solved.bound, work - limit.left, limit.timed_out)


@dataclass(slots=True)
class _State:
    """The best order so far, with its peak, the op and point there, and a bound on all orders."""

    order: list[int]
    peak: int = 0
    peak_op: int = -1
    point: int = 0
    bound: int = field(default=0)


class _Search:
    def __init__(self, limit: WorkLimit) -> None:
        self._limit = limit

    def solve(
        self,
        problem: ScheduleProblem,
        target: int,
        depth: int,
        starts: Sequence[Sequence[int]] = (),
    ) -> _State:
        state = _State(list(range(problem.ops)), bound=max(problem.base))
        state.peak = state.bound
        if problem.ops == 0:
            return state
        self._measure(problem, state)
        self._seed(problem, starts, target, depth, state)
        if depth == 0:
            with self._limit.grant(_FIRST_SHARE):
                self._split_repeatedly(problem, target, depth, state)
            self._raise_bound(problem, target, state)
            for share, window_depth in _EFFORTS:
                self._polish(problem, target, share, window_depth, state)
            self._raise_bound(problem, target, state)
            with self._limit.grant(_PROOF_SHARE):
                self._prove(problem, target, state)
        else:
            self._split_repeatedly(problem, target, depth, state)
        return state

    def _split_repeatedly(
        self, problem: ScheduleProblem, target: int, depth: int, state: _State
    ) -> None:
        """Split at the peak as long as it helps."""
        tried: set[tuple[int, int]] = set()
        rounds = 0
        while rounds < _MAX_ROUNDS and state.peak > target and depth <= _MAX_DEPTH:
            if (state.peak_op, state.point) in tried:
                break
            tried.add((state.peak_op, state.point))
            if not self._improve(problem, target, depth, state):
                break
            rounds += 1

    def _measure(self, problem: ScheduleProblem, state: _State) -> None:
        self._count_peak(problem)
        state.peak, state.peak_op, state.point = peak_of(problem, state.order)

    def _count_peak(self, problem: ScheduleProblem) -> None:
        buffers = len(problem.ready)
        self._limit.left -= problem.points * (problem.ops + buffers) + problem.touches

    def _consider(self, problem: ScheduleProblem, order: Sequence[int], state: _State) -> bool:
        """Take an order if it is better."""
        self._count_peak(problem)
        peak, op, point = peak_of(problem, order)
        if peak >= state.peak:
            return False
        state.order, state.peak, state.peak_op, state.point = list(order), peak, op, point
        return True

    def _seed(
        self,
        problem: ScheduleProblem,
        starts: Sequence[Sequence[int]],
        target: int,
        depth: int,
        state: _State,
    ) -> None:
        for order in starts:
            self._consider(problem, order, state)
            if state.peak <= target:
                return
        if problem.ops == 1:
            return
        for point in range(problem.points):
            if state.peak <= target or self._limit.exhausted():
                return
            self._limit.left -= 3 * (8 * problem.touches + problem.ops)
            for order in (
                list_order(problem, point),
                list_order(problem, point, reverse=True),
                depth_first_order(problem, point),
            ):
                self._consider(problem, order, state)
                if state.peak <= target:
                    return
        if depth == 0:
            self._consider(problem, level_order(problem), state)

    def _raise_bound(self, problem: ScheduleProblem, target: int, state: _State) -> None:
        """Cut at the ops with the most live bytes: no op's cut is above what is live during it."""
        with self._limit.grant(_BOUND_SHARE):
            for point in range(problem.points):
                live = live_during(problem, state.order, point)
                for step in sorted(range(problem.ops), key=lambda k: -live[k]):
                    settled = state.peak <= max(target, state.bound)
                    if settled or live[step] <= state.bound or self._limit.exhausted():
                        break
                    cut = self._cut_in_place(
                        problem, point, state.order[step], late=False, force=[]
                    )
                    state.bound = max(state.bound, cut.bytes if cut else 0)

    def _prove(self, problem: ScheduleProblem, target: int, state: _State) -> None:
        """Find edges that every better order has, and search with them."""
        tight, names = problem, list(range(problem.ops))
        order = state.order
        for _ in range(_PROOF_ROUNDS if problem.points == 1 else 0):
            # Where the bound is far off a proof is out of reach.
            far = state.bound < state.peak - state.peak // 10
            if far or state.peak <= max(target, state.bound) or self._limit.exhausted():
                return
            pairs, bound = forced_pairs(tight, order, state.peak, self._limit.spend)
            state.bound = min(max(state.bound, bound), state.peak)
            if not pairs or state.bound >= state.peak:
                return
            narrowed = tightened(tight, pairs, order)
            if narrowed is None:
                state.bound = state.peak
                return
            tight, names = narrowed[0], [names[op] for op in narrowed[1]]
            with self._limit.grant(_SPLIT_SHARE):
                found = self.solve(tight, target, 1)
                self._measure(tight, found)
                self._raise_bound(tight, target, found)
            state.bound = max(state.bound, min(found.bound, state.peak))
            order = list(found.order)
            if found.peak < state.peak:
                state.order = [names[op] for op in order]
                self._measure(problem, state)

    def _polish(
        self, problem: ScheduleProblem, target: int, share: int, window_depth: int, state: _State
    ) -> None:
        """Improve windows around the peak; where none helps split the whole, while it helps."""
        while state.peak > target and not self._limit.exhausted():
            cut = self._cut_in_place(problem, state.point, state.peak_op, late=False, force=[])
            state.bound = max(state.bound, cut.bytes if cut else 0)
            goal = max(target, state.bound)
            while state.peak > goal and self._improve_window(
                problem, goal, share, window_depth, state
            ):
                pass
            with self._limit.grant(_SPLIT_SHARE):
                better = self._improve(problem, target, 0, state)
            if not better:
                return

    def _improve_window(
        self, problem: ScheduleProblem, goal: int, share: int, window_depth: int, state: _State
    ) -> bool:
        """Solve a window of steps around the peak anew; the steps outside are not affected."""
        order, count = state.order, problem.ops
        at = order.index(state.peak_op)
        reach = _FIRST_REACH
        while reach < 2 * count and not self._limit.exhausted():
            low, high = max(0, at - reach), min(count, at + reach + 1)
            reach *= 2
            done = [False] * count
            for op in order[:low]:
                done[op] = True
            window = order[low:high]
            self._limit.left -= 4 * problem.touches
            # Below the peak outside there is nothing to gain.
            outside = peak_of(problem, order, skip=range(low, high))[0]
            enough = max(goal, min(outside, state.peak - 1))
            with self._limit.grant(share):
                part = part_of(problem, window, done)
                solved = self.solve(part, enough, window_depth)
            if solved.peak >= state.peak:
                continue
            order[low:high] = [window[op] for op in solved.order]
            self._measure(problem, state)
            return True
        return False

    def _improve(self, problem: ScheduleProblem, target: int, depth: int, state: _State) -> bool:
        """Find one better order around the op at the peak; False if there or found is none."""
        op, point = state.peak_op, state.point
        for late in (False, True):
            force: list[tuple[int, Side]] = []
            for _ in range(_TRIES if depth < _DEEP else 1):
                if self._limit.exhausted():
                    return False
                cut = self._cut_in_place(problem, point, op, late=late, force=force)
                if cut is None:
                    break
                if not force:
                    state.bound = max(state.bound, cut.bytes)
                if cut.bytes >= state.peak:
                    if not force:
                        return False  # the op cannot run in less: optimal
                    break
                goal = max(target, state.bound)
                blocked = self._split(problem, op, cut.done, goal, depth, state)
                if blocked is None:
                    return True
                if blocked == op:
                    break
                force.append((blocked, Side.AFTER if cut.done[blocked] else Side.BEFORE))
        return False

    def _split(
        self,
        problem: ScheduleProblem,
        op: int,
        done: list[bool],
        goal: int,
        depth: int,
        state: _State,
    ) -> int | None:
        """Solve the ops before and after `op` apart.

        Returns None if the whole got better, else the op that keeps its part at the peak, or `op`
        where only the whole is no better.
        """
        before = [v for v in state.order if v != op and done[v]]
        after = [v for v in state.order if v != op and not done[v]]
        joined: list[int] = []
        for side, earlier in ((before, [False] * problem.ops), (after, done)):
            self._limit.left -= 3 * problem.touches
            solved = self.solve(part_of(problem, side, earlier), goal, depth + 1)
            if solved.peak >= state.peak:
                return side[solved.peak_op] if solved.peak_op >= 0 else op
            joined += [side[v] for v in solved.order]
            if earlier is not done:
                joined.append(op)
        return None if self._consider(problem, joined, state) else op

    def _cut_in_place(
        self,
        problem: ScheduleProblem,
        point: int,
        op: int,
        *,
        late: bool,
        force: list[tuple[int, Side]],
    ) -> Cut | None:
        """Return `least_cut` with what in-place pairs can save at the op; still a lower bound."""
        best = self._counted(least_cut(problem, point, op, late=late, force=force))
        if best is None:
            return None
        size = problem.size[point]
        pairs = [
            (source, target)
            for source, target in problem.pair[op]
            if size[source] == size[target] and not problem.stays[source]
        ]
        saving = sum(size[target] for target in {target for _, target in pairs})
        for source in dict.fromkeys(source for source, _ in pairs):
            # The output takes the source's place only where all other users of it run before.
            last = [(user, Side.BEFORE) for user in problem.users[source] if user != op]
            cut = self._counted(least_cut(problem, point, op, late=late, force=[*force, *last]))
            if cut is not None and cut.bytes - saving < best.bytes:
                best = Cut(cut.bytes - saving, cut.done, cut.work)
        return best

    def _counted(self, cut: Cut | None) -> Cut | None:
        if cut is not None:
            self._limit.left -= cut.work
        return cut
