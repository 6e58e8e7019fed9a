"""The graph as the rematerialization planner sees it; twin of `src/planner/model.cc`.

Also the plain graph that all planners take, and the random numbers that C++ and Python share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PlannerOp:
    """One kernel of a program; see `src/planner/planner.h` for the meaning of in-place pairs.

    Attributes
    ----------
    time_ns, rerun_ns : int
        Time of the first run, and of running it again (-1: the same).
    workspace : int
        Scratch bytes that are live while it runs.
    inputs, outputs : tuple of int
        Tensors.
    inplace : tuple of (int, int)
        Pairs of an input and the output that may, or for resident inputs does, take its place.
    recomputable : bool
        Whether it may run again.
    """

    time_ns: int
    rerun_ns: int
    workspace: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    inplace: tuple[tuple[int, int], ...] = ()
    recomputable: bool = True


@dataclass(frozen=True, slots=True)
class PlannerGraph:
    """A program in execution order over sized tensors.

    Attributes
    ----------
    sizes : tuple of int
        Bytes per tensor.
    resident, is_output : tuple of bool
        Whether a tensor lies outside the arena at all times, and must be there at the end.
    ops : tuple of PlannerOp
        The kernels.
    """

    sizes: tuple[int, ...]
    resident: tuple[bool, ...]
    is_output: tuple[bool, ...]
    ops: tuple[PlannerOp, ...]


class Random:
    """The generator splitmix64; twin of `src/planner/random.h`."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, bound: int) -> int:
        """Return a number in [0, bound)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return (z ^ (z >> 31)) % bound


class Model:
    """Plain numbers derived from a graph.

    A tensor is *tracked* if it takes memory and some kernel makes it. The program has one block per
    kernel, the recomputations that it needs and then the kernel, and a last block that reads the
    outputs. The *points* of a tensor are the blocks whose kernel makes or reads it; the stretch
    after a point up to the next is a *gap*; the gap after the last point is the tail.
    """

    def __init__(self, graph: PlannerGraph) -> None:
        count, self.ops = len(graph.sizes), len(graph.ops)
        self.sizes = list(graph.sizes)
        self.producer = [-1] * count
        tracked = [False] * count
        overwritten = [self.ops] * count
        once = [not op.recomputable for op in graph.ops]
        for k, op in enumerate(graph.ops):
            for t in op.outputs:
                tracked[t] = not graph.resident[t] and graph.sizes[t] > 0
                if tracked[t]:
                    self.producer[t] = k
            for source, target in op.inplace:
                if graph.resident[source]:
                    overwritten[source] = min(overwritten[source], k)
                    tracked[target] = False
                    self.producer[target] = -1
                    once[k] = True
        self.evictable = [tracked[t] and not once[self.producer[t]] for t in range(count)]
        self.resident_bytes = sum(graph.sizes[t] for t in range(count) if graph.resident[t])
        self.base_time = sum(op.time_ns for op in graph.ops)
        self.rerun = [op.time_ns if op.rerun_ns < 0 else op.rerun_ns for op in graph.ops] + [0]
        self.workspace = [op.workspace for op in graph.ops] + [0]
        self.deadline: list[int] = []
        self.inputs: list[list[int]] = []
        self.outputs: list[list[int]] = []
        self.inplace: list[list[tuple[int, int]]] = []
        for op in graph.ops:
            self.deadline.append(min((overwritten[t] for t in op.inputs), default=self.ops))
            self.inputs.append([t for t in dict.fromkeys(op.inputs) if tracked[t]])
            self.outputs.append([t for t in dict.fromkeys(op.outputs) if tracked[t]])
            pairs = [
                (a, b)
                for a, b in op.inplace
                if tracked[a] and tracked[b] and graph.sizes[a] == graph.sizes[b]
            ]
            self.inplace.append(pairs[:64])
        self.deadline.append(self.ops)
        self.inputs.append([t for t in range(count) if tracked[t] and graph.is_output[t]])
        self.outputs.append([])
        self.inplace.append([])
        self._find_gaps(count)

    def _find_gaps(self, count: int) -> None:
        blocks: list[list[int]] = [[] for _ in range(count)]
        for k in range(self.ops + 1):
            for t in (*self.outputs[k], *self.inputs[k]):
                blocks[t].append(k)
        self.blocks = blocks  # per tensor: its points
        self.first_gap: list[int] = []
        self.points: list[int] = []  # per gap
        self.gap_tensor: list[int] = []
        self.gap_end: list[int] = []  # per gap: the next point, the last block for a tail
        self.is_tail: list[bool] = []
        for t in range(count):
            self.first_gap.append(len(self.points))
            self.points += blocks[t]
            self.gap_tensor += [t] * len(blocks[t])
            self.gap_end += blocks[t][1:] + [self.ops] * bool(blocks[t])
            self.is_tail += [i + 1 == len(blocks[t]) for i in range(len(blocks[t]))]

    def gap_before(self, tensor: int, block: int) -> int:
        """Return the gap that a block lies in, -1 before the tensor is first made."""
        at = bisect_left(self.blocks[tensor], block)
        return self.first_gap[tensor] + at - 1 if at else -1

    def shared_pairs(self, op: int, dies: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
        """Give the in-place pairs that share memory, first come, each tensor in one pair."""
        taken: set[int] = set()
        for source, target in self.inplace[op]:
            if dies(source) and source not in taken and target not in taken:
                taken |= {source, target}
                yield source, target
