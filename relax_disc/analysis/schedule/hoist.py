"""Run kernels that only release memory as early as they can: optimizer updates, mostly.

An order with the least possible peak may still hold tensors for no reason wherever memory is below
the peak: the gradient of a weight can be left to the end with the tensors it is made from.  A
memory budget below that peak then finds them in its way.  A *sink* is a kernel that leaves nothing
in the arena (an update in place); with the kernels that work for it alone it can only release
memory once it is done, so it moves to where its operands are complete, unless that raises the peak
at one of the shapes above its limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relax_disc.analysis.memory.peak import check_order
from relax_disc.analysis.program.tensor_graph import TensorGraph
from relax_disc.analysis.schedule.problem import (
    ScheduleProblem,
    peaks_at_points,
    problem_of,
    traces_at_points,
)

_DEPTH = 2
"""Kernels before a sink that may move with it: a matrix product, and what prepares it."""


def hoist_sinks(
    graph: TensorGraph,
    order: Sequence[int],
    shapes: Sequence[Mapping[str, int]],
    limits: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Move sinks, and what works for them alone, to the earliest place.

    Parameters
    ----------
    graph : TensorGraph
        The program.
    order : sequence of int
        A valid order.
    shapes : sequence of mappings
        Points at which the peak is limited; empty for a numeric graph.
    limits : sequence of int, optional
        Peak allowed at each shape, in bytes, at least that of `order`; by default just that.

    Returns
    -------
    tuple of int
        A valid order whose peak is within the limit at every shape.
    """
    problem = problem_of(graph, shapes or [{}])
    if limits is None:
        limits = peaks_at_points(problem, order)
    return hoisted_within(graph, problem, order, limits)


def hoisted_within(
    graph: TensorGraph, problem: ScheduleProblem, order: Sequence[int], limits: Sequence[int]
) -> tuple[int, ...]:
    """`hoist_sinks` with the graph's problem at the shapes of the limits."""
    clusters = _clusters(graph, order)
    kept: set[int] = set()
    while len(kept) < len(clusters):
        moved = {sink: members for sink, members in clusters.items() if sink not in kept}
        candidate = _hoisted(graph, order, moved)
        if len(candidate) < len(order):  # clusters that wait for each other in a circle
            placed = set(candidate)
            kept |= {sink for sink in moved if sink not in placed}
            continue
        over: set[int] = set()
        for trace, limit in zip(traces_at_points(problem, candidate), limits, strict=True):
            over |= {candidate[k] for k in np.flatnonzero(trace > limit)}
        if not over:
            check_order(graph, candidate)
            return candidate
        kept |= {sink for sink, members in moved.items() if not over.isdisjoint(members)} or set(
            moved
        )
    return tuple(order)


def _clusters(graph: TensorGraph, order: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Map each sink to its cluster: itself and the kernels whose results only the cluster reads."""
    position = {kernel: k for k, kernel in enumerate(order)}
    readers: dict[int, set[int]] = {}
    for index, kernel in enumerate(graph.kernels):
        for tensor in kernel.inputs:
            readers.setdefault(tensor, set()).add(index)
    made = graph.producers()
    stays = set(graph.outputs) | graph.written_in_place()
    clusters: dict[int, tuple[int, ...]] = {}
    for index in order:
        kernel = graph.kernels[index]
        if not all(t in stays and not readers.get(t) for t in kernel.outputs):
            continue
        members, frontier = {index}, [index]
        for _ in range(_DEPTH):
            makers = {made[t] for k in frontier for t in graph.kernels[k].inputs}
            frontier = [
                k
                for k in sorted(m for m in makers if m is not None and m not in members)
                if all(
                    t not in stays and readers.get(t, set()) <= members
                    for t in graph.kernels[k].outputs
                )
            ]
            members.update(frontier)
        clusters[index] = tuple(sorted(members, key=position.__getitem__))
    return clusters


def _hoisted(
    graph: TensorGraph, order: Sequence[int], clusters: Mapping[int, Sequence[int]]
) -> tuple[int, ...]:
    """Place the clusters as early as possible, all else in the given order."""
    made = graph.producers()
    owner = {member: sink for sink, members in clusters.items() for member in members}
    waits: dict[int, set[int]] = {}
    for sink, members in clusters.items():
        needs = {made[t] for k in members for t in graph.kernels[k].inputs}
        needs |= {k for member in members for k in graph.kernels[member].after}
        waits[sink] = {k for k in needs if k is not None and owner.get(k) != sink}
    waiting: dict[int, list[int]] = {}
    for sink, needs in waits.items():
        for k in needs:
            waiting.setdefault(k, []).append(sink)
    result: list[int] = []
    ready = [sink for sink, needs in waits.items() if not needs]

    def finish(kernel: int) -> None:
        result.append(kernel)
        for sink in waiting.get(kernel, ()):
            waits[sink].discard(kernel)
            if not waits[sink]:
                ready.append(sink)

    def flush() -> None:
        while ready:
            for member in clusters[ready.pop(0)]:
                finish(member)

    flush()
    for kernel in order:
        if kernel not in owner:
            finish(kernel)
            flush()
    return tuple(result)
