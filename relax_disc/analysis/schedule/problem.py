"""The scheduling problem of a tensor graph: ops, the buffers that they touch, edges between ops.

A buffer is live from its first toucher to its last; the first is its producer and comes before all
others.  Everything that no order can change is taken out: graph inputs and what is written into
them (`base`), workspaces, outputs that nobody reads and in-place pairs whose input has no other
reader (`extra`, live only while the op runs).  In-place pairs whose input has several readers
depend on the order and stay (`pair`).

Sizes are numbers at several points, so that one order can be judged at several shapes at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from relax_disc.analysis.memory.peak import overlaid_bytes
from relax_disc.analysis.program.tensor_graph import TensorGraph, evaluate_sizes


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """Ops in a legal order, with buffers and precedence."""

    touch: list[list[int]]  # the buffers that each op reads or writes, ascending
    need: list[list[int]]  # the ops that come before each op, ascending
    # in-place pairs (source buffer, target buffer) of each op that depend on the order
    pair: list[list[tuple[int, int]]]
    # whether each buffer is live from the start, to the end
    ready: list[bool]
    stays: list[bool]
    # per point: bytes of each buffer; bytes live only while each op runs (negative: in place)
    size: list[list[int]]
    extra: list[list[int]]
    base: list[int]  # per point: bytes live throughout
    # the transposes of `touch` and `need`
    users: list[list[int]] = field(default_factory=list)
    next: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "users", _transposed(self.touch, len(self.ready)))
        object.__setattr__(self, "next", _transposed(self.need, len(self.need)))

    @property
    def ops(self) -> int:
        """Number of ops."""
        return len(self.touch)

    @property
    def points(self) -> int:
        """Number of points at which sizes are known."""
        return len(self.base)

    def lists(self) -> tuple[Sequence[Any], ...]:
        """Return what C++ makes the problem of."""
        return (
            *(self.touch, self.need, self.pair, self.ready, self.stays),
            *(self.size, self.extra, self.base),
        )


def _transposed(rows: Sequence[Sequence[int]], columns: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(columns)]
    for row, items in enumerate(rows):
        for item in items:
            result[item].append(row)
    return result


def problem_of(graph: TensorGraph, shapes: Sequence[Mapping[str, int]] = ({},)) -> ScheduleProblem:
    """Return the scheduling problem of a graph at some shapes.

    ``graph``: numeric, or symbolic over the dims that `shapes` give. ``shapes``: the points, at
    least one.
    """
    size = evaluate_sizes(graph.sizes, shapes)
    extra = evaluate_sizes([kernel.workspace_bytes for kernel in graph.kernels], shapes)
    resident = sorted(set(graph.inputs))
    base = size[:, resident].sum(axis=1)
    made = graph.producers()
    keep = frozenset(graph.outputs)
    fixed = frozenset(resident) | graph.written_in_place()
    paired = {target for kernel in graph.kernels for _, target in kernel.inplace}
    readers: list[list[int]] = [[] for _ in graph.sizes]
    for index, kernel in enumerate(graph.kernels):
        for tensor in set(kernel.inputs):
            readers[tensor].append(index)

    renamed: dict[int, int] = {}
    for tensor, producer in enumerate(made):
        if producer is None or tensor in fixed or not size[:, tensor].any():
            continue
        if readers[tensor] or tensor in keep or tensor in paired:
            renamed[tensor] = len(renamed)
        else:
            extra[:, producer] += size[:, tensor]
    rows = size.tolist()
    touch, need, pair = [], [], []
    for index, kernel in enumerate(graph.kernels):
        tensors = {*kernel.inputs, *kernel.outputs}
        touch.append(sorted(renamed[tensor] for tensor in tensors if tensor in renamed))
        before = {producer for tensor in kernel.inputs if (producer := made[tensor]) is not None}
        need.append(sorted(before | set(kernel.after)))
        open_pairs = [
            (source, target)
            for source, target in kernel.inplace
            if source in renamed and source not in keep
        ]
        if all(len(readers[source]) == 1 for source, _ in open_pairs):
            extra[:, index] -= [overlaid_bytes(row, open_pairs) for row in rows]
            open_pairs = []
        pair.append([(renamed[a], renamed[b]) for a, b in open_pairs if b in renamed])
    tensors = list(renamed)
    return ScheduleProblem(
        touch=touch,
        need=need,
        pair=pair,
        ready=[False] * len(tensors),
        stays=[tensor in keep for tensor in tensors],
        size=size[:, tensors].tolist(),
        extra=extra.tolist(),
        base=base.tolist(),
    )


def rescaled(
    problem: ScheduleProblem, numerators: Sequence[int], denominators: Sequence[int]
) -> ScheduleProblem:
    """Return the problem with point p's bytes times ``numerators[p] / denominators[p]``.

    Every buffer is rounded up alike, so that equal sizes stay equal and the peaks of two points can
    be compared.  A point's peak is exact up to one unit per live buffer.
    """

    def scale(rows: list[list[int]]) -> list[list[int]]:
        return [
            [-(-value * up // down) for value in row]
            for row, up, down in zip(rows, numerators, denominators, strict=True)
        ]

    base = [row[0] for row in scale([[value] for value in problem.base])]
    return replace(problem, size=scale(problem.size), extra=scale(problem.extra), base=base)


def at_points(problem: ScheduleProblem, points: Sequence[int]) -> ScheduleProblem:
    """Return the problem at some of its points."""
    return replace(
        problem,
        size=[problem.size[point] for point in points],
        extra=[problem.extra[point] for point in points],
        base=[problem.base[point] for point in points],
    )


def peaks_at_points(problem: ScheduleProblem, order: Sequence[int]) -> list[int]:
    """Return the most live bytes of an order at each point."""
    if problem.ops == 0:
        return list(problem.base)
    return [int(live.max()) for live in traces_at_points(problem, order)]


def traces_at_points(problem: ScheduleProblem, order: Sequence[int]) -> list[np.ndarray]:
    """Return the live bytes during each step of an order, at each point."""
    if problem.ops == 0:
        return [np.zeros(0, dtype=np.int64) for _ in problem.base]
    position = np.empty(problem.ops, dtype=np.int64)
    position[np.asarray(order, dtype=np.int64)] = np.arange(problem.ops)
    buffers = len(problem.ready)
    lengths = [len(users) for users in problem.users]
    starts = np.zeros(buffers + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    steps = position[np.fromiter((op for users in problem.users for op in users), dtype=np.int64)]
    if buffers:
        first = np.where(problem.ready, 0, np.minimum.reduceat(steps, starts[:-1]))
        last = np.where(problem.stays, problem.ops, np.maximum.reduceat(steps, starts[:-1]))
    else:
        first = last = np.zeros(0, dtype=np.int64)
    paired = [op for op in range(problem.ops) if problem.pair[op]]
    traces = []
    for size, extra, base in zip(problem.size, problem.extra, problem.base, strict=True):
        change = np.zeros(problem.ops + 2, dtype=np.int64)
        sizes = np.array(size, dtype=np.int64)
        np.add.at(change, first, sizes)
        np.subtract.at(change, last + 1, sizes)
        live = base + np.cumsum(change[: problem.ops])
        live += np.array(extra, dtype=np.int64)[np.asarray(order, dtype=np.int64)]
        for op in paired:
            step = int(position[op])
            dead = [pair for pair in problem.pair[op] if last[pair[0]] == step]
            live[step] -= overlaid_bytes(size, dead)
        traces.append(live)
    return traces
