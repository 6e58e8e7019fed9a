"""The least live memory while one op runs, over all legal orders, as a minimum cut.

While op i runs, its ancestors are done and its descendants are not; every other op is free.  Nodes
are the free ops.  An arc without limit leads from an op to each op that it needs; for each buffer
an arc of its size leads from its producer to a node from which arcs without limit lead to its
readers.  The source side has run: a buffer is paid for where its producer has and some reader has
not.  The cut's value is a lower bound on the live bytes during op i in every order, and its two
sides say which ops to run before and after i to attain it.

`vm_builtins/src/schedule/cut.cc` is the same in C++, arc for arc, so that both count equal work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from relax_disc.analysis.schedule.problem import ScheduleProblem

_NO_LIMIT = 1 << 61


class Side(IntEnum):
    """Where an op stands relative to the op that a cut is made at."""

    FREE = 0
    BEFORE = 1
    AFTER = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """Least live bytes while an op runs; `done` flags the ops that run before it, and itself."""

    bytes: int
    done: list[bool]
    work: int


class CutNetwork:
    """The network of the least live bytes at a point while an op runs.

    Parameters
    ----------
    problem : ScheduleProblem
        Ops, buffers and edges.
    point : int
        Whose sizes count.
    op : int
        The op that runs.
    force : sequence of (int, Side)
        Ops that must stand on a side.

    Attributes
    ----------
    possible : bool
        False where `force` contradicts the edges; then the rest means nothing.
    bytes : int
        The least live bytes over all legal orders.
    """

    def __init__(
        self,
        problem: ScheduleProblem,
        point: int,
        op: int,
        force: Sequence[tuple[int, Side]] = (),
    ) -> None:
        state = [Side.FREE] * problem.ops
        _put_on(Side.AFTER, op, problem, state)
        state[op] = Side.FREE
        _put_on(Side.BEFORE, op, problem, state)
        self.possible = all(_put_on(side, other, problem, state) for other, side in force)
        self.bytes = 0
        self._state = state
        if self.possible:
            self._build(problem, point, op)

    @property
    def work(self) -> int:
        """Arcs looked at so far."""
        return self._network.work + self._touches

    def is_free(self, op: int) -> bool:
        """Whether an op may run before or after."""
        return self._state[op] == Side.FREE

    def done(self, *, late: bool = False) -> list[bool]:
        """Return who runs before: of several least cuts the most ops if `late`, else the fewest."""
        reached = self._network.source_side(late=late)
        return [
            side == Side.BEFORE or (side == Side.FREE and reached[node])
            for side, node in zip(self._state, self._node, strict=True)
        ]

    def bytes_with(self, other: int, side: Side, enough: int) -> int:
        """Return the least bytes with one more op on a side, or a number of at least `enough`."""
        if self._state[other] != Side.FREE:
            return self.bytes if self._state[other] == side else _NO_LIMIT
        node, as_source = self._node[other], side == Side.BEFORE
        return self.bytes + self._network.flow_from(
            node, as_source=as_source, enough=enough - self.bytes
        )

    def _build(self, problem: ScheduleProblem, point: int, op: int) -> None:
        state = self._state
        node, nodes = [], 2
        for side in state:
            node.append({Side.FREE: nodes, Side.BEFORE: 0, Side.AFTER: 1}[side])
            nodes += side == Side.FREE
        network = FlowNetwork(nodes)
        fixed = problem.base[point] + problem.extra[point][op]
        for buffer, users in enumerate(problem.users):
            size = problem.size[point][buffer]
            before = problem.ready[buffer] or any(state[user] == Side.BEFORE for user in users)
            after = problem.stays[buffer] or any(state[user] == Side.AFTER for user in users)
            free = [user for user in users if state[user] == Side.FREE]
            if op in users or (before and after):
                fixed += size
                continue
            if not free or size == 0:
                continue
            # Without `before` the producer is free, and it is the first of them.
            tail = 0 if before else node[free[0]]
            readers = free if before else free[1:]
            if after:
                network.add_arc(tail, 1, size)
            elif len(readers) == 1:
                network.add_arc(tail, node[readers[0]], size)
            elif readers:
                middle = network.add_node()
                network.add_arc(tail, middle, size)
                for user in readers:
                    network.add_arc(middle, node[user], _NO_LIMIT)
        for user, side in enumerate(state):
            if side == Side.FREE:
                for other in problem.need[user]:
                    if state[other] == Side.FREE:
                        network.add_arc(node[user], node[other], _NO_LIMIT)
        self.bytes = fixed + network.maximum_flow()
        self._node, self._network, self._touches = node, network, problem.touches


def least_cut(
    problem: ScheduleProblem,
    point: int,
    op: int,
    *,
    late: bool = False,
    force: Sequence[tuple[int, Side]] = (),
) -> Cut | None:
    """Return the least live bytes while `op` runs, and who runs before it; see `CutNetwork`.

    Returns
    -------
    Cut or None
        None where `force` contradicts the edges.
    """
    network = CutNetwork(problem, point, op, force)
    if not network.possible:
        return None
    return Cut(network.bytes, network.done(late=late), network.work)


def _put_on(side: Side, op: int, problem: ScheduleProblem, state: list[Side]) -> bool:
    """Put an op and all that it entails on a side; False if some of it is on the other side."""
    rows = problem.need if side == Side.BEFORE else problem.next
    if state[op] not in (Side.FREE, side):
        return False
    state[op] = side
    stack = [op]
    while stack:
        for other in rows[stack.pop()]:
            if state[other] == side:
                continue
            if state[other] != Side.FREE:
                return False
            state[other] = side
            stack.append(other)
    return True


class FlowNetwork:
    """Dinic's maximum flow from node 0 to node 1.  Y. Dinitz, Soviet Math. Doklady 11, 1970."""

    def __init__(self, nodes: int) -> None:
        self.work = 0
        self._nodes = nodes
        self._arcs: list[tuple[int, int, int]] = []
        self._begin: list[int] = []
        self._head: list[int] = []
        self._rest: list[int] = []
        self._reverse: list[int] = []
        self._level: list[int] = []

    def add_node(self) -> int:
        """Return a new node."""
        self._nodes += 1
        return self._nodes - 1

    def add_arc(self, tail: int, head: int, capacity: int) -> None:
        """Add an arc."""
        self._arcs.append((tail, head, capacity))

    def maximum_flow(self) -> int:
        """Find a maximum flow and return its value."""
        self._build()
        flow = 0
        while self._find_levels():
            flow += self._augment()
        return flow

    def flow_from(self, node: int, *, as_source: bool, enough: int) -> int:
        """Return how much more flow there is once `node` is joined to the source, or the sink.

        Or at least `enough`; by shortest paths from the node, which stay near it.  Changes nothing.
        """
        begin, head, rest, reverse = self._begin, self._head, self._rest, self._reverse
        goal = 1 if as_source else 0
        pushed: list[tuple[int, int]] = []
        flow = 0
        while flow < enough:
            arrived = {node: -1}
            queue = [node]
            for here in queue:
                if goal in arrived:
                    break
                self.work += begin[here + 1] - begin[here]
                for arc in range(begin[here], begin[here + 1]):
                    along = arc if as_source else reverse[arc]
                    if rest[along] > 0 and head[arc] not in arrived:
                        arrived[head[arc]] = along
                        queue.append(head[arc])
            if goal not in arrived:
                break
            path, here = [], goal
            while here != node:
                path.append(arrived[here])
                here = head[reverse[path[-1]]] if as_source else head[path[-1]]
            amount = min(rest[arc] for arc in path)
            for arc in path:
                rest[arc] -= amount
                rest[reverse[arc]] += amount
                pushed.append((arc, amount))
            flow += amount
        for arc, amount in pushed:
            rest[arc] += amount
            rest[reverse[arc]] -= amount
        return flow

    def source_side(self, *, late: bool) -> list[bool]:
        """Return who is on the source side of the least cut nearest the source, or the sink."""
        reached = [False] * self._nodes
        queue = [1 if late else 0]
        reached[queue[0]] = True
        for node in queue:
            for arc in range(self._begin[node], self._begin[node + 1]):
                rest = self._rest[self._reverse[arc] if late else arc]
                if rest > 0 and not reached[self._head[arc]]:
                    reached[self._head[arc]] = True
                    queue.append(self._head[arc])
        return [not r for r in reached] if late else reached

    def _build(self) -> None:
        """Sort arcs by tail; give each its reverse."""
        begin = [0] * (self._nodes + 1)
        for tail, head, _ in self._arcs:
            begin[tail + 1] += 1
            begin[head + 1] += 1
        for node in range(self._nodes):
            begin[node + 1] += begin[node]
        count = 2 * len(self._arcs)
        self._head, self._rest, self._reverse = [0] * count, [0] * count, [0] * count
        at = begin[:-1]
        for tail, head, capacity in self._arcs:
            forth = at[tail]
            at[tail] += 1
            back = at[head]
            at[head] += 1
            self._head[forth], self._rest[forth], self._reverse[forth] = head, capacity, back
            self._head[back], self._rest[back], self._reverse[back] = tail, 0, forth
        self._begin = begin
        self.work += count

    def _find_levels(self) -> bool:
        """Find distances to the sink over open arcs; False if the source cannot reach it."""
        begin, head, rest, reverse = self._begin, self._head, self._rest, self._reverse
        level = [-1] * self._nodes
        level[1] = 0
        queue = [1]
        for node in queue:
            self.work += begin[node + 1] - begin[node]
            for arc in range(begin[node], begin[node + 1]):
                other = head[arc]
                if level[other] < 0 and rest[reverse[arc]] > 0:
                    level[other] = level[node] + 1
                    queue.append(other)
        self._level = level
        return level[0] >= 0

    def _augment(self) -> int:
        """Return a blocking flow along arcs that lead one level down."""
        begin, head, rest, level = self._begin, self._head, self._rest, self._level
        following = begin[:-1]
        path: list[int] = []
        flow, node = 0, 0
        while True:
            if node == 1:
                pushed = min(rest[arc] for arc in path)
                full = len(path)
                for k in range(len(path) - 1, -1, -1):
                    rest[path[k]] -= pushed
                    rest[self._reverse[path[k]]] += pushed
                    if rest[path[k]] == 0:
                        full = k
                self.work += len(path)
                flow += pushed
                node = head[self._reverse[path[full]]]
                del path[full:]
                continue
            start = arc = following[node]
            end, below = begin[node + 1], level[node] - 1
            while arc < end and not (rest[arc] > 0 and level[head[arc]] == below):
                arc += 1
            following[node] = arc
            self.work += arc - start + 1
            if arc < end:
                path.append(arc)
                node = head[arc]
            elif not path:
                return flow
            else:
                level[node] = -1
                node = head[self._reverse[path.pop()]]
                following[node] += 1
