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
from itertools import chain
from typing import Any

import numpy as np

from relax_disc.analysis.program.tensor_graph import TensorGraph, evaluate_sizes


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleProblem:
    """Ops in a legal order, with buffers and precedence."""

    touch: list[list[int]]  # the buffers that each op reads or writes, ascending
    need: list[list[int]]  # the ops that come before each op, ascending
    # in-place pairs (source buffer, target buffer) of each op that depend on the order
    pair: list[list[tuple[int, int]]]
    # whether each buffer is live from the start, to the end
    ready: list[bool]
    stays: list[bool]
    # int64, a row for each point: bytes of each buffer; bytes live only while each op runs
    # (negative: in place)
    size: np.ndarray
    extra: np.ndarray
    base: list[int]  # per point: bytes live throughout
    # the transposes of `touch` and `need`
    users: list[list[int]] = field(default_factory=list)
    next: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, columns in (("size", len(self.ready)), ("extra", len(self.touch))):
            rows = np.asarray(getattr(self, name), dtype=np.int64)
            object.__setattr__(self, name, rows.reshape(len(self.base), columns))
        if not self.users:
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
            *(self.size.tolist(), self.extra.tolist(), self.base),
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
            extra[:, index] -= _overlaid(size, open_pairs)
            open_pairs = []
        pair.append([(renamed[a], renamed[b]) for a, b in open_pairs if b in renamed])
    tensors = list(renamed)
    return ScheduleProblem(
        touch=touch,
        need=need,
        pair=pair,
        ready=[False] * len(tensors),
        stays=[tensor in keep for tensor in tensors],
        size=size[:, tensors],
        extra=extra,
        base=base.tolist(),
    )


def _overlaid(size: np.ndarray, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return `overlaid_bytes` at each point."""
    saved = np.zeros(len(size), dtype=np.int64)
    taken: dict[int, np.ndarray] = {}  # per tensor: the points at which it takes part in a pair
    for source, target in pairs:
        fits = size[:, source] == size[:, target]
        for tensor in (source, target):
            fits = fits & np.logical_not(taken.get(tensor, False))
        for tensor in (source, target):
            taken[tensor] = fits | taken.get(tensor, False)
        saved += np.where(fits, size[:, target], 0)
    return saved


def rescaled(
    problem: ScheduleProblem, numerators: Sequence[int], denominators: Sequence[int]
) -> ScheduleProblem:
    """Return the problem with point p's bytes times ``numerators[p] / denominators[p]``.

    Every buffer is rounded up alike, so that equal sizes stay equal and the peaks of two points can
    be compared.  A point's peak is exact up to one unit per live buffer.
    """

    def scale(rows: list[list[int]]) -> list[list[int]]:  # products may exceed 64 bits
        return [
            [-(-value * up // down) for value in row]
            for row, up, down in zip(rows, numerators, denominators, strict=True)
        ]

    base = [row[0] for row in scale([[value] for value in problem.base])]
    size, extra = (np.array(scale(rows.tolist())) for rows in (problem.size, problem.extra))
    return replace(problem, size=size, extra=extra, base=base)


def at_points(problem: ScheduleProblem, points: Sequence[int]) -> ScheduleProblem:
    """Return the problem at some of its points."""
    return replace(
        problem,
        size=problem.size[list(points)],
        extra=problem.extra[list(points)],
        base=[problem.base[point] for point in points],
    )


def peaks_at_points(problem: ScheduleProblem, order: Sequence[int]) -> list[int]:
    """Return the most live bytes of an order at each point."""
    if problem.ops == 0:
        return list(problem.base)
    return traces_at_points(problem, order).max(axis=1).tolist()


def traces_at_points(problem: ScheduleProblem, order: Sequence[int]) -> np.ndarray:
    """Return the live bytes during each step of an order: a row for each point."""
    ops, buffers = problem.ops, len(problem.ready)
    live = np.zeros((problem.points, ops), dtype=np.int64)
    live += np.array(problem.base, dtype=np.int64)[:, None]
    if ops == 0:
        return live
    position = np.empty(ops, dtype=np.int64)
    position[np.asarray(order, dtype=np.int64)] = np.arange(ops)
    last = np.zeros(0, dtype=np.int64)
    if buffers:
        starts = np.cumsum([0, *map(len, problem.users)])
        steps = position[np.fromiter(chain.from_iterable(problem.users), np.int64, starts[-1])]
        first = np.where(problem.ready, 0, np.minimum.reduceat(steps, starts[:-1]))
        last = np.where(problem.stays, ops, np.maximum.reduceat(steps, starts[:-1]))
        live += _sum_before(problem.size, first, ops) - _sum_before(problem.size, last + 1, ops)
    live += problem.extra[:, np.asarray(order, dtype=np.int64)]
    for op, pairs in enumerate(problem.pair):
        if dead := [pair for pair in pairs if last[pair[0]] == position[op]]:
            live[:, position[op]] -= _overlaid(problem.size, dead)
    return live


def _sum_before(size: np.ndarray, steps: np.ndarray, count: int) -> np.ndarray:
    """Return for each of `count` steps the sizes of those whose own step is that or earlier."""
    order = np.argsort(steps, kind="stable")
    sums = np.zeros((len(size), size.shape[1] + 1), dtype=np.int64)
    np.cumsum(size[:, order], axis=1, out=sums[:, 1:])
    return sums[:, np.searchsorted(steps[order], np.arange(count), side="right")]
