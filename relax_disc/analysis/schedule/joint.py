"""One order for several shapes, at none of them worse than the given order.

Each shape alone gives its best peak and a bound.  The peaks of all shapes, each divided by its
best, are then minimised at once: one search over one problem with a point for each shape.  Every
search has its own share of the work.

Where the result is worse than the given order at some shape, that shape joins the points, and a
point's divisor is lowered so that exceeding the given peak there counts as more than the worst
ratio W that is aimed at: min(best, given / W).  An order whose worst quotient is W or less passes.
If no such order is found the best order that passes is taken; the given order always does.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_disc.analysis.memory.peak import overlaid_bytes
from relax_disc.analysis.schedule.problem import (
    ScheduleProblem,
    at_points,
    peaks_at_points,
    rescaled,
)
from relax_disc.analysis.schedule.split import Found, split_search

Shape = Mapping[str, int]

WORK_LIMIT = 500_000_000  # arcs: 2 to 4 s of one core; structured graphs need a hundredth
_TIME_LIMIT_S = 60.0  # a last resort: with it the result may depend on the machine
_SCALE = 10**9  # units of one shape's best peak
_ENOUGH = 1.001  # worst ratio at which to stop
_AIMS = (1.003, 1.01, 1.03, 1.1)  # growth of the worst ratio allowed for being nowhere worse
_SMALL_OPS = 64  # up to which an exact search is worth a try, within so many states:
_SMALL_STATES = 20_000


class JointSearch:
    """Search for one order; see the module.

    ``problem``: the graph at all shapes at which the order must be no worse than the given one.
    ``points``: those of its points to optimise for. ``bounds``: at each of these: no order has a
    smaller peak. ``timed_out``: whether the time limit ended a search.
    """

    def __init__(self, problem: ScheduleProblem, points: Sequence[int], work: int) -> None:
        self._judge = problem
        self._points = tuple(points)
        self._problem = at_points(problem, points)
        self.bounds = list(self._problem.base)
        self.timed_out = False
        self._given = list(range(problem.ops))
        self._limits = peaks_at_points(problem, self._given)
        self._best = [0] * len(points)
        # A search for all shapes at once, and one for each aim, beside those for each shape alone.
        is_alone = problem.points == 1
        self._share = work if is_alone else work // (len(points) + 1 + len(_AIMS))

    def best_order(self) -> list[int]:
        """Return one order for all shapes."""
        candidates = [self._given]
        for point in range(len(self._points)):
            candidates.append(self._solve_alone(point, candidates[1:]))
        if self._judge.points == 1:
            return candidates[-1]
        peaks = [peaks_at_points(self._problem, order) for order in candidates]
        self._best = [max(min(column), 1) for column in zip(*peaks, strict=True)]
        order = min(candidates, key=self._worst_ratio)
        if self._worst_ratio(order) > _ENOUGH:
            order = self._solve_jointly(self._points, self._best, candidates, _ENOUGH)
        aimed = self._worst_ratio(order)
        violated: tuple[int, ...] = ()
        for growth in _AIMS:
            excess = self._worst_excess(order)
            if excess is None:
                return order
            violated = (*violated, excess)
            aim = max(aimed, _ENOUGH) * growth
            points = (*self._points, *violated)
            limits = [self._limits[point] for point in points]
            best = (*self._best, *(self._limits[k] for k in violated))
            divisors = [
                max(min(own, int(limit / aim)), 1) for own, limit in zip(best, limits, strict=True)
            ]
            order = self._solve_jointly(points, divisors, candidates, aim)
        passing = [order for order in candidates if self._worst_excess(order) is None]
        return min(passing, key=self._worst_ratio)

    def _solve_alone(self, point: int, starts: Sequence[list[int]]) -> list[int]:
        problem = at_points(self._problem, [point])
        found = self._split(problem, starts, 0)
        order, peak, bound = found.order, found.peak, found.bound
        if bound < peak and problem.ops <= _SMALL_OPS:
            exact = exact_order(problem, peak, _SMALL_STATES)
            if exact.order is not None:
                order, peak = exact.order, peaks_at_points(problem, exact.order)[0]
            if exact.is_complete:
                bound = peak
        self.bounds[point] = bound
        return order

    def _solve_jointly(
        self,
        points: Sequence[int],
        divisors: Sequence[int],
        candidates: list[list[int]],
        aim: float,
    ) -> list[int]:
        """Minimise the worst quotient, down to `aim`; the result joins the candidates."""
        problem = at_points(self._judge, points)
        scaled = rescaled(problem, [_SCALE] * problem.points, divisors)
        # Every buffer and op may have been rounded up by one unit.
        target = int(aim * _SCALE) + problem.ops + len(problem.ready)
        order = self._split(scaled, candidates, target).order
        candidates.append(order)
        return order

    def _split(self, problem: ScheduleProblem, starts: Sequence[list[int]], target: int) -> Found:
        found = split_search(
            problem, starts, target=target, work=self._share, seconds=_TIME_LIMIT_S
        )
        self.timed_out |= found.timed_out
        return found

    def _worst_ratio(self, order: Sequence[int]) -> float:
        """Return the greatest ratio over the shapes of an order's peak to the best one found."""
        peaks = peaks_at_points(self._problem, order)
        return max(peak / best for peak, best in zip(peaks, self._best, strict=True))

    def _worst_excess(self, order: Sequence[int]) -> int | None:
        """Return where an order exceeds the given order's peak most; None if nowhere."""
        peaks = peaks_at_points(self._judge, order)
        ratios = [peak / max(limit, 1) for peak, limit in zip(peaks, self._limits, strict=True)]
        worst = max(range(len(ratios)), key=ratios.__getitem__)
        return worst if peaks[worst] > self._limits[worst] else None


@dataclass(frozen=True, slots=True)
class Exact:
    """Result of `exact_order`."""

    order: list[int] | None  # the best order; None if no order is better than what is known
    is_complete: bool  # False if the search gave up: then there may be a better order


def exact_order(problem: ScheduleProblem, known_peak: int, max_states: int) -> Exact:
    """Return an order with the least peak, if that is less than `known_peak`.

    A set of ops that is closed under "needs" is a state; running one more op is a step, and costs
    what is live meanwhile.  The path whose dearest step is cheapest is the best order (Dijkstra's
    algorithm with max in place of sum).  States whose cost is not below the known peak are left
    out, so that an exhausted search proves the known order optimal.  There may be 2 ** ops states.

    ``problem``: with one point. ``known_peak``: peak of an order that is known. ``max_states``:
    where to give up.
    """
    size, extra = problem.size[0].tolist(), problem.extra[0].tolist()
    needs = [sum(1 << other for other in row) for row in problem.need]
    users = [sum(1 << op for op in row) for row in problem.users]
    full = (1 << problem.ops) - 1
    first_live = problem.base[0] + sum(
        bytes_ for bytes_, ready in zip(size, problem.ready, strict=True) if ready
    )
    cost = {0: 0}
    live = {0: first_live}
    came_by: dict[int, int] = {}
    # Of equal costs the set with the most ops first: it is nearest to the end.
    queue = [(0, 0, 0)]
    settled: set[int] = set()
    while queue:
        so_far, _, done = heapq.heappop(queue)
        if done in settled:
            continue
        settled.add(done)
        if done == full:
            return Exact(_path(came_by, full), is_complete=True)
        if len(settled) > max_states:
            return Exact(None, is_complete=False)
        for op in range(problem.ops):
            if done >> op & 1 or needs[op] & ~done:
                continue
            after = done | 1 << op
            made = sum(
                size[b] for b in problem.touch[op] if not problem.ready[b] and not users[b] & done
            )
            dead = [b for b in problem.touch[op] if not problem.stays[b] and not users[b] & ~after]
            pairs = [pair for pair in problem.pair[op] if pair[0] in dead]
            during = live[done] + made + extra[op] - overlaid_bytes(size, pairs)
            step = max(so_far, during)
            if step >= known_peak or step >= cost.get(after, known_peak):
                continue
            cost[after] = step
            live[after] = live[done] + made - sum(size[b] for b in dead)
            came_by[after] = op
            heapq.heappush(queue, (step, -after.bit_count(), after))
    return Exact(None, is_complete=True)


def _path(came_by: dict[int, int], state: int) -> list[int]:
    order = []
    while state:
        order.append(came_by[state])
        state ^= 1 << order[-1]
    return order[::-1]
