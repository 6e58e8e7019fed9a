"""One order of a program's kernels whose peak of live memory is near the best at every shape.

`schedule_ops` returns the order with its certificate: a lower bound on the peak of every order, at
each shape that was looked at.  With several shapes the worst ratio of a shape's peak to the best
peak found for that shape alone is minimised.  The result is never worse than the given order at any
shape that was checked: a shape where it would be joins the sample, and if that does not help, the
best order that passes is taken; the given order always does.

Reference for the method: `schedule_split`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from relax_disc.analysis.schedule_paper import paper_order
from relax_disc.analysis.schedule_problem import (
    ScheduleProblem,
    at_points,
    peaks_at_points,
    problem_of,
    rescaled,
)
from relax_disc.analysis.schedule_rules import (
    depth_first_order,
    inductor_bfs_order,
    inductor_dfs_order,
    list_order,
    lpmf_order,
)
from relax_disc.analysis.schedule_shapes import check_shapes, sample_shapes
from relax_disc.analysis.schedule_split import split_search
from relax_disc.analysis.tensor_graph import TensorGraph, check_shape
from relax_disc.errors import GraphError

Strategy = Literal[
    "min_cut",
    "given",
    "paper",
    "list",
    "list_backward",
    "depth_first",
    "inductor_lpmf",
    "inductor_bfs",
    "inductor_dfs",
]
Shape = Mapping[str, int]

WORK_LIMIT = 500_000_000  # arcs: 2 to 4 s of one core in C++; structured graphs need a hundredth
_TIME_LIMIT_S = 60.0  # a last resort: with it the result may depend on the machine
_SCALE = 10**9  # units of one shape's best peak
_ENOUGH = _SCALE + _SCALE // 1000  # stop at 0.1 % above the best peak of every shape
_GUARD_ROUNDS = 3

_RULES: dict[str, Callable[[ScheduleProblem, int], list[int]]] = {
    "list": list_order,
    "list_backward": lambda problem, point: list_order(problem, point, reverse=True),
    "depth_first": depth_first_order,
    "inductor_lpmf": lpmf_order,
    "inductor_bfs": inductor_bfs_order,
    "inductor_dfs": inductor_dfs_order,
}


@dataclass(frozen=True, slots=True)
class SchedulePoint:
    """What an order means at one shape.

    Attributes
    ----------
    shape : mapping of str to int
        The shape; empty for a numeric graph.
    peak_bytes : int
        Most live bytes.
    lower_bound_bytes : int
        No order has a smaller peak at this shape.
    given_peak_bytes : int
        Most live bytes of the given order.
    """

    shape: Shape
    peak_bytes: int
    lower_bound_bytes: int
    given_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of a graph's kernels, and how good it is.

    Attributes
    ----------
    order : tuple of int
        Kernel indices in the order to run them.
    peak_bytes : int
        Most live bytes; with several shapes the greatest of them.
    lower_bound_bytes : int
        No order has a smaller peak at that shape.
    is_optimal : bool
        Whether the bound equals the peak, at every shape of `points`: a proof.
    points : tuple of SchedulePoint
        The shapes that were optimised for.
    checked_shapes : int
        At how many shapes it was checked that the peak is not above the given order's.
    timed_out : bool
        Whether the time limit ended a search; only then may another machine find another order.
    """

    order: tuple[int, ...]
    peak_bytes: int
    lower_bound_bytes: int
    is_optimal: bool
    points: tuple[SchedulePoint, ...] = ()
    checked_shapes: int = 0
    timed_out: bool = False


def schedule_ops(
    graph: TensorGraph,
    shapes: Shape | Sequence[Shape] | None = None,
    *,
    strategy: Strategy = "min_cut",
    work_limit: int = WORK_LIMIT,
    native: bool = True,
) -> Schedule:
    """Find an order of a graph's kernels with a small peak of live memory.

    Parameters
    ----------
    graph : TensorGraph
        Numeric or symbolic.
    shapes : mapping, or sequence of mappings, optional
        The shapes to optimise for; by default corners and middle of the declared ranges.
    strategy : str
        "min_cut" for the best order.  The others, to compare with: "given"; "paper", the rule of
        BladeDISC++; "list" and "list_backward", least growth of memory; "depth_first";
        "inductor_lpmf", "inductor_bfs", "inductor_dfs", the rules of torch inductor.  Rules other
        than the paper's look at the last of the shapes, and may be worse than the given order.
    work_limit : int
        How much to search, for all shapes together; the order depends on it, on no clock.
    native : bool
        Use C++ where it is there; the result is the same, up to the work limit's.

    Returns
    -------
    Schedule
        The order and its certificate.

    Raises
    ------
    GraphError
        If no shape is given, or a size is negative at a shape.
    ShapeRangeError
        If a shape does not fit the graph's dims.
    """
    points = _points(graph, shapes)
    problem = problem_of(graph, points)
    search = _Search(problem, work_limit, native)
    given = list(range(problem.ops))
    if strategy != "min_cut":
        if strategy == "given":
            order = given
        elif strategy == "paper":
            order = list(paper_order(graph))
        elif strategy in _RULES:
            order = _RULES[strategy](problem, problem.points - 1)
        else:
            raise GraphError(f"unknown strategy {strategy!r}; known are {('min_cut', *_RULES)}")
        search.bound_only(order)
        return _schedule(points, search, order, 0)
    if not graph.dims:
        return _schedule(points, search, search.best_order(), 1)
    return _guarded(graph, points, search, work_limit, native)


def _points(graph: TensorGraph, shapes: Shape | Sequence[Shape] | None) -> tuple[Shape, ...]:
    if shapes is None:
        return sample_shapes(graph.dims)
    points = (shapes,) if isinstance(shapes, Mapping) else tuple(shapes)
    if not points:
        raise GraphError("schedule_ops needs at least one shape")
    for shape in points:
        check_shape(graph.dims, shape)
    return points


def _guarded(
    graph: TensorGraph, points: tuple[Shape, ...], search: _Search, work_limit: int, native: bool
) -> Schedule:
    """Find an order that is at no checked shape worse than the given one."""
    checks = (*points, *check_shapes(graph.dims))
    judge = problem_of(graph, checks)
    limits = peaks_at_points(judge, range(judge.ops))
    order = search.best_order()
    for _ in range(_GUARD_ROUNDS):
        peaks = peaks_at_points(judge, order)
        ratios = [peak / max(limit, 1) for peak, limit in zip(peaks, limits, strict=True)]
        worst = max(range(len(checks)), key=ratios.__getitem__)
        if ratios[worst] <= 1:
            break
        points = (*points, checks[worst])
        search = _Search(problem_of(graph, points), work_limit, native, search.candidates)
        order = search.best_order()

    def passes(candidate: Sequence[int]) -> bool:
        peaks = peaks_at_points(judge, candidate)
        return all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))

    if not passes(order):
        passing = [candidate for candidate in search.candidates if passes(candidate)]
        order = min(passing, key=search.worst_ratio, default=list(range(judge.ops)))
    return _schedule(points, search, order, len(checks))


class _Search:
    """The best peak at each point alone, and one order for all of them.

    `candidates` collects the orders met on the way.
    """

    def __init__(
        self,
        problem: ScheduleProblem,
        work: int,
        native: bool,
        candidates: Sequence[list[int]] = (),
    ) -> None:
        self.problem = problem
        self.candidates = [list(range(problem.ops)), *candidates]
        self.bounds = list(problem.base)
        self.best = [0] * problem.points
        self.timed_out = False
        self._native = native
        self._work = work

    def best_order(self) -> list[int]:
        """Return one order for all points."""
        points = self.problem.points
        share = self._work // (points + 2) if points > 1 else self._work
        for point in range(points):
            order = self._solve(at_points(self.problem, [point]), share, point)
            self.candidates.append(order)
        if points == 1:
            return self.candidates[-1]
        peaks = [peaks_at_points(self.problem, order) for order in self.candidates]
        self.best = [min(column) for column in zip(*peaks, strict=True)]
        order = min(self.candidates, key=self.worst_ratio)
        if self.worst_ratio(order) * _SCALE <= _ENOUGH:
            return order
        ones = [_SCALE] * points
        scaled = rescaled(self.problem, ones, [max(peak, 1) for peak in self.best])
        found = split_search(
            scaled,
            self.candidates,
            target=_ENOUGH,
            work=2 * share,
            seconds=_TIME_LIMIT_S,
            native=self._native,
        )
        self.timed_out |= found.timed_out
        self.candidates.append(found.order)
        return min(found.order, order, key=self.worst_ratio)

    def bound_only(self, order: list[int]) -> None:
        """Find the bounds for an order that somebody else made."""
        self.candidates.append(order)
        for point in range(self.problem.points):
            self._solve(at_points(self.problem, [point]), self._work // self.problem.points, point)

    def worst_ratio(self, order: Sequence[int]) -> float:
        """Return the greatest ratio over the points of an order's peak to the best one found."""
        peaks = peaks_at_points(self.problem, order)
        return max(peak / max(best, 1) for peak, best in zip(peaks, self.best, strict=True))

    def _solve(self, problem: ScheduleProblem, work: int, point: int) -> list[int]:
        found = split_search(
            problem,
            self.candidates[1:],
            work=work,
            seconds=_TIME_LIMIT_S,
            native=self._native,
        )
        self.bounds[point] = found.bound
        self.best[point] = found.peak
        self.timed_out |= found.timed_out
        return found.order


def _schedule(
    shapes: Sequence[Shape], search: _Search, order: Sequence[int], checked: int
) -> Schedule:
    peaks = peaks_at_points(search.problem, order)
    given = peaks_at_points(search.problem, range(search.problem.ops))
    points = tuple(
        SchedulePoint(dict(shape), peak, bound, before)
        for shape, peak, bound, before in zip(shapes, peaks, search.bounds, given, strict=True)
    )
    top = max(points, key=lambda point: point.peak_bytes)
    return Schedule(
        order=tuple(order),
        peak_bytes=top.peak_bytes,
        lower_bound_bytes=top.lower_bound_bytes,
        is_optimal=all(point.peak_bytes == point.lower_bound_bytes for point in points),
        points=points,
        checked_shapes=checked,
        timed_out=search.timed_out,
    )
