"""Lower the peaks of an order at many shapes by small moves, raising none.

A search for a few shapes bounds their peaks and leaves all else as it comes: between those shapes
another kernel may be where the peak is, and its order be left to chance.  Here each kernel at which
some shape has its peak is moved before one that makes what waits meanwhile, or one that frees
memory is moved before it; the kernels that the moved one needs go with it.  A move stays if no
shape's peak rises and one falls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from relax_disc.analysis.schedule.problem import (
    ScheduleProblem,
    at_points,
    peaks_at_points,
    traces_at_points,
)

_WINDOW = 16  # kernels before and after the peak that are looked at
_WORK = 5_000_000  # kernels times shapes, over all moves that are judged


def settle_peaks(problem: ScheduleProblem, order: Sequence[int]) -> tuple[int, ...]:
    """Return a legal order whose peak is at no point above the given order's.

    ``problem``: at all shapes that count. ``order``: a legal order of its ops.
    """
    result = list(order)
    if not problem.ops:
        return tuple(result)
    left = _WORK
    settled = False
    while not settled and left > 0:
        settled = True
        traces = traces_at_points(problem, result)
        tops = [int(trace.argmax()) for trace in traces]
        peaks = [int(trace.max()) for trace in traces]
        for top in sorted(set(tops), key=lambda step: (-tops.count(step), step)):
            here = [point for point, step in enumerate(tops) if step == top]
            found, work = _best_move(problem, result, top, here, peaks)
            left -= work
            if found is not None:
                result, settled = found, False
                break
            if left <= 0:
                break
    return tuple(result)


def _best_move(
    problem: ScheduleProblem, order: list[int], top: int, here: Sequence[int], peaks: Sequence[int]
) -> tuple[list[int] | None, int]:
    """Return the order after the move that lowers the peaks at `top` most, and the work done."""
    part = at_points(problem, here)
    before = np.array([peaks[point] for point in here], dtype=np.float64)
    judged, work = [], 0
    for candidate in _moves(problem, order, top):
        work += problem.ops * len(here)
        after = np.array(peaks_at_points(part, candidate), dtype=np.float64)
        if np.all(after <= before) and np.any(after < before):
            judged.append((float(np.sum(after / np.maximum(before, 1))), candidate))
    for _, candidate in sorted(judged, key=lambda pair: pair[0]):
        work += problem.ops * problem.points
        after = peaks_at_points(problem, candidate)
        if all(new <= old for new, old in zip(after, peaks, strict=True)):
            return candidate, work
    return None, work


def _moves(problem: ScheduleProblem, order: list[int], top: int) -> Iterator[list[int]]:
    """Yield orders in which less may be live at step `top`."""
    position = {op: step for step, op in enumerate(order)}
    peak = order[top]
    for step in range(top - 1, max(top - _WINDOW, 0) - 1, -1):
        waiting = (
            buffer
            for buffer in problem.touch[order[step]]
            if peak not in problem.users[buffer]
            and min(position[op] for op in problem.users[buffer]) == step
            and max(position[op] for op in problem.users[buffer]) > top
        )
        if any(True for _ in waiting):
            yield from _pulled(problem, order, step, top)
    for step in range(top + 1, min(top + _WINDOW, len(order) - 1) + 1):
        freed = (
            buffer
            for buffer in problem.touch[order[step]]
            if not problem.stays[buffer]
            and peak not in problem.users[buffer]
            and min(position[op] for op in problem.users[buffer]) < top
            and max(position[op] for op in problem.users[buffer]) == step
        )
        if any(True for _ in freed):
            yield from _pulled(problem, order, top, step)


def _pulled(
    problem: ScheduleProblem, order: list[int], before: int, step: int
) -> Iterator[list[int]]:
    """Yield the order with the op of a step, and what it needs, before another; if it may be."""
    moved = {order[step]}
    for op in reversed(order[before:step]):
        if any(reader in moved for reader in problem.next[op]):
            moved.add(op)
    if order[before] not in moved:
        inside = order[before : step + 1]
        first = [op for op in inside if op in moved]
        rest = [op for op in inside if op not in moved]
        yield [*order[:before], *first, *rest, *order[step + 1 :]]
