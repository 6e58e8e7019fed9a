"""What every order with a smaller peak has in common.

Force a free op to the side of an op's cut that it is not on.  If the cut is then no less than the
best peak known, every better order has the two the other way round: a new edge.  Edges make cuts
larger, so that in the end the bound meets the peak, or a better order is found.

`vm_builtins/src/schedule/probe.cc` is the same in C++.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

from relax_disc.analysis.schedule.min_cut import CutNetwork, Side
from relax_disc.analysis.schedule.problem import ScheduleProblem, live_during, part_of

_PROBED_OPS = 64  # at which cuts are made in one round


def forced_pairs(
    problem: ScheduleProblem,
    order: Sequence[int],
    peak: int,
    spend: Callable[[int], bool],
) -> tuple[list[tuple[int, int]], int]:
    """Find pairs (a, b) such that in any order with a peak below `peak` a runs before b.

    Parameters
    ----------
    problem : ScheduleProblem
        With one point.
    order : sequence of int
        A legal order; cuts are made at its ops with the most live bytes.
    peak : int
        The best peak known.
    spend : callable
        Takes work that was done; returns whether the limit is exhausted.

    Returns
    -------
    tuple
        The pairs, and the greatest of the cuts; if that is no less than `peak` no such order
        exists.
    """
    pairs: list[tuple[int, int]] = []
    bound = 0
    live = live_during(problem, order, 0)
    steps = sorted(range(problem.ops), key=lambda k: -live[k])[:_PROBED_OPS]
    for op in (order[step] for step in steps):
        options = _options_at(problem, op)
        spend(sum(network.work for network, _ in options))
        least = min(options, key=lambda option: option[0].bytes - option[1])
        bound = max(bound, least[0].bytes - least[1])
        if bound >= peak:
            return pairs, bound
        prober = _Prober(problem, op, options, peak, spend)
        done = least[0].done()
        for other in range(problem.ops):
            if spend(0):
                break
            if done[other]:
                prober.probe(other, problem.need, Side.AFTER)
        for other in range(problem.ops - 1, -1, -1):
            if spend(0):
                break
            if not done[other]:
                prober.probe(other, problem.next, Side.BEFORE)
        pairs += prober.pairs
        if spend(0):
            break
    return pairs, bound


def _options_at(problem: ScheduleProblem, op: int) -> list[tuple[CutNetwork, int]]:
    """Return cuts at an op with what in-place pairs can save there."""
    size = problem.size[0]
    pairs = [
        (source, target)
        for source, target in problem.pair[op]
        if size[source] == size[target] and not problem.stays[source]
    ]
    saving = sum(size[target] for target in {target for _, target in pairs})
    options = [(CutNetwork(problem, 0, op), 0)]
    for source in dict.fromkeys(source for source, _ in pairs):
        last = [(user, Side.BEFORE) for user in problem.users[source] if user != op]
        network = CutNetwork(problem, 0, op, last)
        if network.possible:
            options.append((network, saving))
    return options


class _Prober:
    """Asks of free ops whether they may stand on the other side of an op's cut.

    If an op may, so may all that this entails less of: of the done ops those after it, of the
    others those before it.
    """

    def __init__(
        self,
        problem: ScheduleProblem,
        op: int,
        options: list[tuple[CutNetwork, int]],
        peak: int,
        spend: Callable[[int], bool],
    ) -> None:
        self.pairs: list[tuple[int, int]] = []
        self._may = [False] * problem.ops
        self._op, self._options, self._peak, self._spend = op, options, peak, spend

    def probe(self, other: int, stronger: Sequence[Sequence[int]], side: Side) -> None:
        """Ask of one op; `stronger` lists the ops whose move entails its own."""
        if other == self._op or not self._options[0][0].is_free(other):
            return
        if any(self._may[j] for j in stronger[other]):
            self._may[other] = True
            return
        for network, saving in self._options:
            before, enough = network.work, self._peak + saving
            self._may[other] = network.bytes_with(other, side, enough) < enough
            self._spend(network.work - before)
            if self._may[other]:
                return
        self.pairs.append((other, self._op) if side == Side.AFTER else (self._op, other))


def tightened(
    problem: ScheduleProblem, edges: Sequence[tuple[int, int]], order: Sequence[int]
) -> tuple[ScheduleProblem, list[int]] | None:
    """Return the problem with more edges, and its ops in a legal order near `order`.

    The ops of the new problem are numbered in that order.  None if the edges make a cycle.
    """
    need = [set(row) for row in problem.need]
    for first, second in edges:
        need[second].add(first)
    copy = replace(problem, need=[sorted(row) for row in need])
    position = [0] * problem.ops
    for step, op in enumerate(order):
        position[op] = step
    waits = [len(row) for row in copy.need]
    ready = [position[op] for op, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    legal = []
    while ready:
        op = order[heapq.heappop(ready)]
        legal.append(op)
        for other in copy.next[op]:
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready, position[other])
    if len(legal) < problem.ops:
        return None
    return part_of(copy, legal, [False] * problem.ops), legal
