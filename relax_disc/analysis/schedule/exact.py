"""The best order of a small problem, proved: a shortest path over the sets of ops that have run.

A set of ops that is closed under "needs" is a state; running one more op is a step, and costs what
is live meanwhile.  The path whose dearest step is cheapest is the best order (Dijkstra's algorithm
with max in place of sum).  States whose cost is not below a known peak are left out, so that an
exhausted search proves the known order optimal.

Limits: the number of states may grow as 2 ** ops; the search gives up at `max_states`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from relax_disc.analysis.memory.peak import overlaid_bytes
from relax_disc.analysis.schedule.problem import ScheduleProblem


@dataclass(frozen=True, slots=True)
class Exact:
    """Result of `exact_order`.

    Attributes
    ----------
    order : list of int or None
        The best order; None if no order is better than what is known.
    is_complete : bool
        False if the search gave up: then there may be a better order.
    """

    order: list[int] | None
    is_complete: bool


def exact_order(problem: ScheduleProblem, known_peak: int, max_states: int) -> Exact:
    """Return an order with the least peak, if that is less than `known_peak`.

    Parameters
    ----------
    problem : ScheduleProblem
        With one point.
    known_peak : int
        Peak of an order that is known.
    max_states : int
        Where to give up.
    """
    size, extra = problem.size[0], problem.extra[0]
    needs = [sum(1 << other for other in row) for row in problem.need]
    users = [sum(1 << op for op in row) for row in problem.users]
    full = (1 << problem.ops) - 1
    first_live = problem.base[0] + sum(
        bytes_ for bytes_, ready in zip(size, problem.ready, strict=True) if ready
    )
    cost = {0: 0}
    live = {0: first_live}
    came_by: dict[int, int] = {}
    # Of equal costs the set with the most ops first: it is nearest to the end.
    queue = [(0, 0, 0)]
    settled: set[int] = set()
    while queue:
        so_far, _, done = heapq.heappop(queue)
        if done in settled:
            continue
        settled.add(done)
        if done == full:
            return Exact(_path(came_by, full), is_complete=True)
        if len(settled) > max_states:
            return Exact(None, is_complete=False)
        for op in range(problem.ops):
            if done >> op & 1 or needs[op] & ~done:
                continue
            after = done | 1 << op
            made = sum(
                size[b] for b in problem.touch[op] if not problem.ready[b] and not users[b] & done
            )
            dead = [b for b in problem.touch[op] if not problem.stays[b] and not users[b] & ~after]
            pairs = [pair for pair in problem.pair[op] if pair[0] in dead]
            during = live[done] + made + extra[op] - overlaid_bytes(size, pairs)
            step = max(so_far, during)
            if step >= known_peak or step >= cost.get(after, known_peak):
                continue
            cost[after] = step
            live[after] = live[done] + made - sum(size[b] for b in dead)
            came_by[after] = op
            heapq.heappush(queue, (step, -after.bit_count(), after))
    return Exact(None, is_complete=True)


def _path(came_by: dict[int, int], state: int) -> list[int]:
    order = []
    while state:
        order.append(came_by[state])
        state ^= 1 << order[-1]
    return order[::-1]
