"""The scheduling rule of BladeDISC++, on symbolic sizes.

From a list of ready operators it takes, step by step, one whose impact on memory (bytes allocated
less bytes freed) is least, comparing the expressions symbolically; where that is undecided, the one
whose outputs have the shorter lifetime.  Reference: BladeDISC++: Memory Optimizations Based On
Symbolic Shape, section 3 (operator scheduling), https://arxiv.org/abs/2412.16985.

Lifetime is not defined there to the letter; here it is the distance in program order from an
operator to the last reader of what it makes.
"""

from __future__ import annotations

from benchmarks.scheduling.graphs import dependencies
from relax_disc.analysis.program.tensor_graph import Size, TensorGraph
from relax_disc.analysis.symbolic.comparison.compare import Order, compare
from relax_disc.analysis.symbolic.expr import SymbolicExpr

_SIGNS = {
    Order.LESS: -1,
    Order.LESS_EQUAL: -1,
    Order.EQUAL: 0,
    Order.GREATER: 1,
    Order.GREATER_EQUAL: 1,
}


def paper_order(graph: TensorGraph) -> tuple[int, ...]:
    """Return the order of the paper's rule.

    Parameters
    ----------
    graph : TensorGraph
        Numeric or symbolic; the one order holds for every shape.
    """
    rule = _Rule(graph)
    waits, following = dependencies(graph)
    ready = [index for index, count in enumerate(waits) if count == 0]
    order = []
    while ready:
        best = ready[0]
        for index in ready[1:]:
            if rule.is_better(index, best):
                best = index
        ready.remove(best)
        order.append(best)
        rule.run(best)
        for other in following[best]:
            waits[other] -= 1
            if waits[other] == 0:
                ready.append(other)
        ready.sort()
    return tuple(order)


class _Rule:
    """What is live so far, and the preference between two ready operators."""

    def __init__(self, graph: TensorGraph) -> None:
        self._graph = graph
        self._fixed = frozenset(graph.inputs) | graph.written_in_place()
        self._left = [0] * len(graph.sizes)
        last_reader = [-1] * len(graph.sizes)
        for index, kernel in enumerate(graph.kernels):
            for tensor in set(kernel.inputs):
                self._left[tensor] += 1
                last_reader[tensor] = index
        for tensor in graph.outputs:
            self._left[tensor] += 1  # the end reads it
            last_reader[tensor] = len(graph.kernels)
        self._lifetime = [
            max((last_reader[tensor] - index for tensor in kernel.outputs), default=0)
            for index, kernel in enumerate(graph.kernels)
        ]
        self._impacts: dict[int, Size] = {}
        self._signs: dict[tuple[Size, Size], int | None] = {}
        self._readers: dict[int, list[int]] = {}
        for index, kernel in enumerate(graph.kernels):
            for tensor in set(kernel.inputs):
                self._readers.setdefault(tensor, []).append(index)

    def is_better(self, a: int, b: int) -> bool:
        """Whether to run `a` rather than `b`, which comes before it in program order."""
        sign = self._sign(self._impact(a), self._impact(b))
        if sign:
            return sign < 0
        return self._lifetime[a] < self._lifetime[b]

    def run(self, index: int) -> None:
        """Account for running an operator."""
        for tensor in set(self._graph.kernels[index].inputs):
            self._left[tensor] -= 1
            if self._left[tensor] == 1:
                for reader in self._readers[tensor]:
                    self._impacts.pop(reader, None)

    def _impact(self, index: int) -> Size:
        """Bytes that the operator allocates less the bytes of inputs that nobody else reads."""
        if index not in self._impacts:
            kernel, sizes = self._graph.kernels[index], self._graph.sizes
            impact: Size = 0
            for tensor in kernel.outputs:
                if tensor not in self._fixed and self._left[tensor]:
                    impact = impact + sizes[tensor]
            for tensor in sorted(set(kernel.inputs)):
                if tensor not in self._fixed and self._left[tensor] == 1:
                    impact = impact - sizes[tensor]
            self._impacts[index] = impact
        return self._impacts[index]

    def _sign(self, a: Size, b: Size) -> int | None:
        """Sign of a - b where it is the same at every shape; None where it is not known."""
        if not isinstance(a, SymbolicExpr) and not isinstance(b, SymbolicExpr):
            return (a > b) - (a < b)
        if (a, b) not in self._signs:
            self._signs[a, b] = _SIGNS.get(compare(a, b, self._graph.dims).order)
        return self._signs[a, b]
