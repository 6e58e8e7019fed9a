"""Which tensors are worth giving up between two uses, judged with symbolic sizes.

A tensor is a candidate if it lies unused while other kernels run, and if some subgraph that
computes it again holds less memory meanwhile than the tensor itself: the benefit is the tensor's
bytes minus those of the subgraph's inputs that would have to be kept for it alone.  The subgraph
starts as the producer and grows through inputs that cost too much.  What cannot be decided for all
shapes is kept: the plan of each shape decides.

Reference: BladeDISC++ (arXiv 2412.16985), section 2.3.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from relax_disc.analysis.program.tensor_graph import TensorGraph
from relax_disc.analysis.symbolic.comparison.compare import Order, compare
from relax_disc.analysis.symbolic.expr import SymbolicExpr

_LEAST_GAP = 2
"""Kernels between two uses; with fewer there is no time to use the memory for anything else."""

_MOST_KERNELS = 24
"""Size at which the search for a subgraph gives up: a longer one is never chosen first."""

_NEVER_WORTH = (Order.LESS, Order.LESS_EQUAL, Order.EQUAL)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor that may be given up in one gap between uses."""

    tensor: int  # index in the graph
    # kernels at the gap's ends
    last_use: int
    next_use: int
    kernels: tuple[int, ...]  # a subgraph that computes it again, in program order


def find_candidates(graph: TensorGraph) -> tuple[Candidate, ...]:
    """List the worthwhile gaps of all tensors, by tensor.

    ``graph``: with symbolic or numeric sizes. Returned: one per tensor: its widest gap.
    """
    search = _Search(graph)
    found = (search.candidate(tensor) for tensor in range(len(graph.sizes)))
    return tuple(candidate for candidate in found if candidate is not None)


class _Search:
    def __init__(self, graph: TensorGraph) -> None:
        self._graph = graph
        self._made = graph.producers()
        self._uses: list[list[int]] = [[] for _ in graph.sizes]
        for index, kernel in enumerate(graph.kernels):
            for tensor in dict.fromkeys((*kernel.inputs, *kernel.outputs)):
                self._uses[tensor].append(index)
        self._stays = set(graph.inputs) | set(graph.outputs) | graph.written_in_place()
        self._orders: dict[tuple[SymbolicExpr, SymbolicExpr], Order] = {}

    def candidate(self, tensor: int) -> Candidate | None:
        producer, uses = self._made[tensor], self._uses[tensor]
        if producer is None or tensor in self._stays or len(uses) < 2:
            return None
        gap, last, following = max((b - a, a, b) for a, b in pairwise(uses))
        if gap <= _LEAST_GAP:
            return None
        kernels = self._subgraph(tensor, producer, following)
        return None if kernels is None else Candidate(tensor, last, following, kernels)

    def _subgraph(self, tensor: int, producer: int, place: int) -> tuple[int, ...] | None:
        """Kernels to run before `place`; None where all need as much memory as they free."""
        kernels: set[int] = set()
        kept: dict[int, None] = {}  # inputs that would have to be kept for this alone
        frontier = [-producer]
        while frontier:
            k = -heapq.heappop(frontier)
            if k in kernels:
                continue
            if not self._graph.kernels[k].recomputable or len(kernels) >= _MOST_KERNELS:
                return None
            kernels.add(k)
            for output in self._graph.kernels[k].outputs:
                kept.pop(output, None)
            for source in self._graph.kernels[k].inputs:
                if not self._is_there(source, place) and self._made[source] not in kernels:
                    kept[source] = None
            if self._order(tensor, list(kept)) not in _NEVER_WORTH:
                return tuple(sorted(kernels))
            frontier = sorted({-maker for s in kept if (maker := self._made[s]) is not None})
        return None

    def _is_there(self, tensor: int, place: int) -> bool:
        """Whether a tensor is in memory at a kernel anyway."""
        if tensor in self._stays or self._made[tensor] is None:
            return True
        return self._uses[tensor][-1] >= place

    def _order(self, tensor: int, kept: Sequence[int]) -> Order:
        """How a tensor's bytes compare with those of others together."""
        size = SymbolicExpr(self._graph.sizes[tensor])
        others = SymbolicExpr()
        for other in kept:
            others = others + self._graph.sizes[other]
        key = (size, others)
        if key not in self._orders:
            self._orders[key] = compare(size, others, self._graph.dims).order
        return self._orders[key]
