"""Exact live memory of a numeric tensor graph, step by step.

While a kernel runs its inputs and all its outputs are live, and its workspace; a tensor dies after
its last use; graph inputs are live throughout and graph outputs stay to the end.  Where an
in-place pair allows it and the input dies at that kernel, an output of the same size takes the
input's place and is not counted beside it.  A graph input that is written in place holds its new
value too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_disc.analysis.program.tensor_graph import TensorGraph
from relax_disc.errors import GraphError


@dataclass(frozen=True, slots=True)
class LiveRange:
    """Steps during which one tensor occupies memory; ``last_use`` is inclusive."""

    tensor: int
    first: int
    last_use: int


def check_order(graph: TensorGraph, order: Sequence[int]) -> None:
    """Check that an order runs each kernel once, after everything it needs.

    Raises `GraphError`: naming the first kernel that comes too early.
    """
    count = len(graph.kernels)
    position = [-1] * count
    for step, index in enumerate(order):
        if not 0 <= index < count or position[index] >= 0:
            raise GraphError(f"step {step}: kernel {index} is unknown or runs twice")
        position[index] = step
    if len(order) != count:
        raise GraphError(f"the order runs {len(order)} of {count} kernels")
    made = graph.producers()
    for step, index in enumerate(order):
        kernel = graph.kernels[index]
        for other in (*(made[tensor] for tensor in kernel.inputs), *kernel.after):
            if other is not None and position[other] >= step:
                raise GraphError(
                    f"step {step}: kernel {index} ({kernel.name}) runs before kernel {other} "
                    f"({graph.kernels[other].name}), which it needs"
                )


def live_ranges(graph: TensorGraph, order: Sequence[int] | None = None) -> tuple[LiveRange, ...]:
    """Return the live range of each tensor that is made or read, by tensor number.

    Graph inputs live from step 0 to the last step; graph outputs live to the last step.  A tensor
    that overwrites a graph input in place is left out: the input's range covers it.
    """
    order = range(len(graph.kernels)) if order is None else order
    last = max(len(graph.kernels) - 1, 0)
    first: dict[int, int] = dict.fromkeys(graph.inputs, 0)
    last_use: dict[int, int] = dict.fromkeys(graph.inputs, last)
    resident = frozenset(graph.inputs)
    overlay = graph.written_in_place()
    for step, index in enumerate(order):
        kernel = graph.kernels[index]
        for tensor in kernel.outputs:
            first[tensor] = last_use[tensor] = step
        for tensor in kernel.inputs:
            if tensor not in resident:
                last_use[tensor] = step
    for tensor in graph.outputs:
        last_use[tensor] = last
    return tuple(
        LiveRange(tensor, first[tensor], last_use[tensor])
        for tensor in sorted(first)
        if tensor not in overlay
    )


def live_trace(graph: TensorGraph, order: Sequence[int] | None = None) -> np.ndarray:
    """Return the live bytes during each step.

    Parameters
    ----------
    graph : TensorGraph
        A numeric graph (see `TensorGraph.at`).
    order : sequence of int, optional
        Kernel indices in the order they run; the graph's own order by default.

    Returns
    -------
    numpy.ndarray
        int64, one entry per step: what is live while that kernel runs.

    Raises
    ------
    GraphError
        If the graph is not numeric or the order is not valid.
    """
    if not graph.is_numeric:
        raise GraphError("live bytes need a numeric graph: use graph.at(shape)")
    if order is None:
        order = range(len(graph.kernels))
    else:
        check_order(graph, order)
    ranges = live_ranges(graph, order)
    sizes = graph.numbers()
    change = np.zeros(len(graph.kernels) + 1, dtype=np.int64)
    dies_at = {}
    for live in ranges:
        change[live.first] += sizes[live.tensor]
        change[live.last_use + 1 if graph.kernels else 0] -= sizes[live.tensor]
        dies_at[live.tensor] = live.last_use
    keep = frozenset(graph.inputs) | frozenset(graph.outputs)
    trace = np.cumsum(change[:-1])
    for step, index in enumerate(order):
        kernel = graph.kernels[index]
        trace[step] += kernel.workspace_bytes
        if kernel.inplace:
            dead = [
                (source, target)
                for source, target in kernel.inplace
                if dies_at.get(source) == step and source not in keep
            ]
            trace[step] -= overlaid_bytes(sizes, dead)
    return trace


def overlaid_bytes(sizes: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> Any:
    """Return the bytes that in-place pairs save at a kernel at which all their inputs die.

    Pairs are taken in their order; each tensor takes part in at most one, and the two must have the
    same size.  Sizes, and with them the result, are numbers or expressions.
    """
    saved, sources, targets = 0, set(), set()
    for source, target in pairs:
        if source in sources or target in targets or sizes[source] != sizes[target]:
            continue
        sources.add(source)
        targets.add(target)
        saved += sizes[target]
    return saved


def peak_bytes(graph: TensorGraph, order: Sequence[int] | None = None) -> int:
    """Return the most live bytes over all steps; see `live_trace`."""
    sizes = graph.numbers()
    resident = sum(sizes[tensor] for tensor in graph.inputs)
    trace = live_trace(graph, order)
    return max(resident, int(trace.max())) if len(trace) else resident
