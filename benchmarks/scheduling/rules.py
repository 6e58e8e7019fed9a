"""Orders by simple rules, those of others among them, to compare ours with.

Every rule has the signature ``(problem, point) -> order``; sizes count at one point.

* `list_order`: of the ready ops that which adds least to what is live after it; forwards, or
  backwards from the end.
* `depth_first_order`: post-order from the sinks, operands with the most bytes below them first.
* `lpmf_order`, `inductor_bfs_order`, `inductor_dfs_order`: the three rules of
  torch/_inductor/memory.py, written anew from what its docstrings say.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Mapping, Sequence

from benchmarks.scheduling.paper import paper_order
from relax_disc.analysis import TensorGraph
from relax_disc.analysis.schedule.problem import ScheduleProblem, problem_of


def list_order(problem: ScheduleProblem, point: int, *, reverse: bool = False) -> list[int]:
    """Return the list schedule by least growth of live bytes; ties by program order."""
    need, following = (problem.next, problem.need) if reverse else (problem.need, problem.next)
    stays = problem.ready if reverse else problem.stays
    seen = list(problem.stays if reverse else problem.ready)
    size = problem.size[point]
    left = [len(users) for users in problem.users]
    waits = [len(row) for row in need]
    sign = -1 if reverse else 1
    current: dict[int, int] = {}
    queue: list[tuple[int, int]] = []

    def push(op: int) -> None:
        growth = 0
        for buffer in problem.touch[op]:
            if not seen[buffer]:
                growth += size[buffer]
            if left[buffer] == 1 and not stays[buffer]:
                growth -= size[buffer]
        current[op] = growth
        heapq.heappush(queue, (growth, sign * op))

    for op, count in enumerate(waits):
        if count == 0:
            push(op)
    order = []
    while queue:
        growth, key = heapq.heappop(queue)
        op = sign * key
        if current.get(op) != growth:
            continue
        del current[op]
        order.append(op)
        for buffer in problem.touch[op]:
            changed = not seen[buffer] or left[buffer] == 2
            seen[buffer] = True
            left[buffer] -= 1
            if changed:
                for user in problem.users[buffer]:
                    if user in current:
                        push(user)
        for other in following[op]:
            waits[other] -= 1
            if waits[other] == 0:
                push(other)
    return order[::-1] if reverse else order


def depth_first_order(problem: ScheduleProblem, point: int) -> list[int]:
    """Return the post-order from the sinks, operands with the most bytes below them first."""
    total = [0.0] * problem.ops  # shared parts count once for each path: too large for int64
    for buffer, users in enumerate(problem.users):
        if not problem.ready[buffer]:
            total[users[0]] += float(problem.size[point][buffer])
    for op, needs in enumerate(problem.need):
        for other in needs:
            total[op] += total[other]
    key = [(-total[op], op) for op in range(problem.ops)]
    sinks = [op for op in range(problem.ops) if not problem.next[op]]
    return _post_order(problem, sorted(sinks, key=key.__getitem__), key)


def _post_order(
    problem: ScheduleProblem, roots: Sequence[int], key: Sequence[tuple[float, int]]
) -> list[int]:
    """Return the depth-first post-order from the roots in turn; operands by least key."""
    seen = [False] * problem.ops
    order = []
    for root in roots:
        if seen[root]:
            continue
        seen[root] = True
        stack = [(root, iter(sorted(problem.need[root], key=key.__getitem__)))]
        while stack:
            op, needs = stack[-1]
            other = next((j for j in needs if not seen[j]), None)
            if other is None:
                order.append(op)
                stack.pop()
            else:
                seen[other] = True
                stack.append((other, iter(sorted(problem.need[other], key=key.__getitem__))))
    return order


def lpmf_order(problem: ScheduleProblem, point: int) -> list[int]:
    """Return the order of the rule "least peak memory first".

    Of the ready ops that run within the largest peak so far that after which least is live; where
    none does, that which adds least while it runs.  Ties go to what frees more, then to program
    order.
    """
    size = problem.size[point]
    left = [len(users) for users in problem.users]
    waits = [len(row) for row in problem.need]
    live = sum(bytes_ for bytes_, ready in zip(size, problem.ready, strict=True) if ready)
    peak = live
    ready = {op for op, count in enumerate(waits) if count == 0}
    written: list[list[int]] = [[] for _ in range(problem.ops)]
    for buffer, users in enumerate(problem.users):
        if not problem.ready[buffer]:
            written[users[0]].append(buffer)
    allocates = [sum(size[buffer] for buffer in row) for row in written]

    def frees(op: int) -> int:
        return sum(
            size[buffer]
            for buffer in problem.touch[op]
            if left[buffer] == 1 and not problem.stays[buffer]
        )

    order = []
    while ready:
        freed = {op: frees(op) for op in ready}
        fitting = [op for op in ready if live + allocates[op] <= peak]
        if fitting:
            op = min(fitting, key=lambda k: (allocates[k] - freed[k], k))
        else:
            op = min(ready, key=lambda k: (allocates[k], -freed[k], k))
        ready.discard(op)
        order.append(op)
        peak = max(peak, live + allocates[op])
        live += allocates[op] - freed[op]
        for buffer in problem.touch[op]:
            left[buffer] -= 1
        for other in problem.next[op]:
            waits[other] -= 1
            if waits[other] == 0:
                ready.add(other)
    return order


def inductor_bfs_order(problem: ScheduleProblem, point: int = 0) -> list[int]:
    """Return, again and again, the ready op whose predecessors ran earliest; sizes do not count."""
    waits = [len(row) for row in problem.need]
    position = [0] * problem.ops
    queue: list[tuple[list[int], int]] = [([], op) for op, count in enumerate(waits) if count == 0]
    order = []
    while queue:
        _, op = heapq.heappop(queue)
        position[op] = len(order)
        order.append(op)
        for other in problem.next[op]:
            waits[other] -= 1
            if waits[other] == 0:
                ran = sorted(position[before] for before in problem.need[other])
                heapq.heappush(queue, (ran, other))
    return order


def inductor_dfs_order(problem: ScheduleProblem, point: int) -> list[int]:
    """Return a post-order; the ops that read and write most bytes are visited first."""
    size = problem.size[point]
    moved = [sum(size[buffer] for buffer in row) for row in problem.touch]
    roots = sorted(range(problem.ops), key=lambda op: (-moved[op], op))
    return _post_order(problem, roots, [(0.0, op) for op in range(problem.ops)])


RULES: dict[str, Callable[[ScheduleProblem, int], list[int]]] = {
    "list": list_order,
    "list_backward": functools.partial(list_order, reverse=True),
    "depth_first": depth_first_order,
    "inductor_lpmf": lpmf_order,
    "inductor_bfs": inductor_bfs_order,
    "inductor_dfs": inductor_dfs_order,
}


def order_by_rule(graph: TensorGraph, shapes: Sequence[Mapping[str, int]], rule: str) -> list[int]:
    """Return the order of a rule, the "given" one, or that of the "paper" (`scheduling_paper`).

    Rules other than the paper's, which compares symbolically, see the sizes of the last shape.
    """
    if rule == "given":
        return list(range(len(graph.kernels)))
    if rule == "paper":
        return list(paper_order(graph))
    return RULES[rule](problem_of(graph, shapes), len(shapes) - 1)
