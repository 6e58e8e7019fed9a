"""One order of a program's kernels whose peak of live memory is near the best at every shape.

`schedule_ops` returns the order with its certificate: a lower bound on the peak of every order, at
each shape that it optimises for.  With several shapes the worst ratio of a shape's peak to the best
peak found for that shape alone is minimised.  The result is never worse than the given order at any
shape that is looked at: those, and where the caller names none a grid over the declared ranges.

The search is in `joint` (several shapes) and `split` (the method).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_disc.analysis.program.tensor_graph import TensorGraph, check_shape
from relax_disc.analysis.schedule.joint import WORK_LIMIT, JointSearch, Shape
from relax_disc.analysis.schedule.problem import ScheduleProblem, peaks_at_points, problem_of
from relax_disc.analysis.schedule.shapes import check_shapes, sample_shapes
from relax_disc.errors import GraphError


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
    checked : tuple of mapping
        Shapes at which it was checked that the peak is not above the given order's.
    timed_out : bool
        Whether the time limit ended a search; only then may another machine find another order.
    """

    order: tuple[int, ...]
    peak_bytes: int
    lower_bound_bytes: int
    is_optimal: bool
    points: tuple[SchedulePoint, ...] = ()
    checked: tuple[Shape, ...] = ()
    timed_out: bool = False


def schedule_ops(
    graph: TensorGraph,
    shapes: Shape | Sequence[Shape] | None = None,
    *,
    work_limit: int = WORK_LIMIT,
) -> Schedule:
    """Find an order of a graph's kernels with a small peak of live memory.

    Parameters
    ----------
    graph : TensorGraph
        Numeric or symbolic.
    shapes : mapping, or sequence of mappings, optional
        The shapes to optimise for, and to be no worse than the given order at; by default corners
        and middle of the declared ranges, and a grid over them to check.
    work_limit : int
        How much to search, for all shapes together; the order depends on it, on no clock.

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
    points, checked = points_and_checks(graph, shapes)
    return best_schedule(problem_of(graph, checked), points, checked, work_limit)


def points_and_checks(
    graph: TensorGraph, shapes: Shape | Sequence[Shape] | None
) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """Return the shapes to optimise for, and with them those to be no worse at, each once."""
    if shapes is None:
        points, checks = sample_shapes(graph.dims), check_shapes(graph.dims)
    else:
        points, checks = (shapes,) if isinstance(shapes, Mapping) else tuple(shapes), ()
        if not points:
            raise GraphError("schedule_ops needs at least one shape")
        for shape in points:
            check_shape(graph.dims, shape)
    return points, tuple({tuple(shape.items()): shape for shape in (*points, *checks)}.values())


def best_schedule(
    problem: ScheduleProblem,
    points: Sequence[Shape],
    checked: Sequence[Shape],
    work_limit: int = WORK_LIMIT,
) -> Schedule:
    """`schedule_ops` of a graph whose problem at the shapes `checked` is known."""
    places = [checked.index(shape) for shape in points]
    search = JointSearch(problem, places, work_limit)
    order = search.best_order()
    peaks, given = (peaks_at_points(problem, each) for each in (order, range(problem.ops)))
    facts = tuple(
        SchedulePoint(dict(shape), peaks[place], bound, given[place])
        for shape, place, bound in zip(points, places, search.bounds, strict=True)
    )
    top = max(facts, key=lambda point: point.peak_bytes)
    return Schedule(
        order=tuple(order),
        peak_bytes=top.peak_bytes,
        lower_bound_bytes=top.lower_bound_bytes,
        is_optimal=all(point.peak_bytes == point.lower_bound_bytes for point in facts),
        points=facts,
        checked=tuple(checked),
        timed_out=search.timed_out,
    )
