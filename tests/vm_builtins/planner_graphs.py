"""Random planner graphs and checkers of plans that share nothing with the planners."""

import heapq
import itertools
import random
from typing import Any

from benchmarks.memory.planner_peak import planner_peak
from relax_disc.vm_builtins.planner import PlannerGraph, PlannerOp

ALIGNMENT = 4


def random_graph(seed, most=25, plain=False):
    """A program of 3 to `most` kernels; `plain` ones have no sharing, residents or workspaces."""
    rng = random.Random(seed)
    sizes, resident, outputs, ops, overwritten = [], [], [], [], set()

    def tensor(is_resident):
        sizes.append(0 if rng.random() < 0.1 else rng.randint(1, 20) * rng.randint(1, 6))
        resident.append(is_resident)
        outputs.append(rng.random() < 0.1)
        return len(sizes) - 1

    for _ in range(0 if plain else rng.randint(0, 3)):
        tensor(True)
    for _ in range(rng.randint(3, most)):
        usable = [t for t in range(len(sizes)) if t not in overwritten]
        near = usable[-6:] if rng.random() < 0.7 else usable
        reads = sorted({rng.choice(near) for _ in range(rng.randint(0, 3))}) if near else []
        pairs, written, recomputable = [], [], rng.random() > 0.15
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 3])):
            made = tensor(not plain and rng.random() < 0.05)
            written.append(made)
            if not reads or plain or rng.random() < 0.5:
                continue
            read = rng.choice(reads)
            if not resident[read]:
                if rng.random() < 0.7:
                    sizes[made] = sizes[read]
                pairs.append((read, made))
            elif rng.random() < 0.3 and read not in overwritten:
                pairs.append((read, made))
                recomputable = False
                overwritten.add(read)
        time = rng.randint(0, 30)
        again = -1 if rng.random() < 0.7 else time + rng.randint(0, 5)
        workspace = 0 if plain else rng.choice([0, 0, 0, 7, 20])
        ops.append(
            PlannerOp(
                time, again, workspace, tuple(reads), tuple(written), tuple(pairs), recomputable
            )
        )
    return PlannerGraph(tuple(sizes), tuple(resident), tuple(outputs), tuple(ops))


def there_and_back(seed, length=3):
    """A chain of kernels, and one back that reads what each of those made; plain."""
    rng = random.Random(seed)
    ops, sizes = [], []
    for k in range(2 * length):
        sizes.append(4 * rng.randint(1, 6))
        reads = (k - 1,) if 0 < k else ()
        if k >= length:
            reads = (2 * length - 1 - k, k - 1) if k > length else (k - 1,)
        time, recomputable = rng.randint(1, 20), rng.random() > 0.3
        ops.append(PlannerOp(time, -1, 0, reads, (k,), (), recomputable))
    count = len(sizes)
    return PlannerGraph(tuple(sizes), (False,) * count, (False,) * count, tuple(ops))


def _outside(graph):
    """Tensors that take no memory of the program's own."""
    resident = {t for t, inside in enumerate(graph.resident) if inside}
    pairs = itertools.chain.from_iterable(op.inplace for op in graph.ops)
    return resident | {target for source, target in pairs if source in resident}


def _check_runs(graph, sequence):
    """First runs are in order and complete, and nothing runs again that must not."""
    ran, overwritten = set(), set()
    for k in sequence:
        op = graph.ops[k]
        rewrites = {source for source, _ in op.inplace if graph.resident[source]}
        if k in ran:
            assert op.recomputable and not rewrites, f"kernel {k} runs again"
        else:
            assert ran == set(range(k)), f"kernel {k} runs out of order"
        assert not overwritten & set(op.inputs), f"kernel {k} reads what was overwritten"
        overwritten |= rewrites
        ran.add(k)
    assert ran == set(range(len(graph.ops)))


def replay(graph, sequence):
    """Check a sequence; return its peak of live bytes, residents counted, and its time."""
    _check_runs(graph, sequence)
    time, ran = 0, set()
    for k in sequence:
        op = graph.ops[k]
        time += op.rerun_ns if k in ran and op.rerun_ns >= 0 else op.time_ns
        ran.add(k)
    return planner_peak(graph, sequence), time


def run_in_arena(graph, plan, alignment=ALIGNMENT):
    """Run a plan over an arena of units that hold what was written; check every read.

    Transfers happen in the order of their requests: all at once, or as late as can be.
    """
    _check_runs(graph, plan.sequence)
    for late in (False, True) if plan.transfers else (False,):
        _run_in_arena(graph, plan, alignment, late)


class _Tier:
    """What transfers move between an arena and the slots of a tier."""

    def __init__(self, plan, arena, place, late):
        self._plan, self._arena, self._place, self._late = plan, arena, place, late
        self._slots, self._requested, self._done = {}, 0, 0

    def wait(self, position):
        due = [
            i for i, t in enumerate(self._plan.transfers[: self._requested]) if t.wait <= position
        ]
        while self._done <= max(due, default=-1):
            self._move()

    def request(self, position, is_read):
        """Begin reads before a position, writes after it."""
        transfers = self._plan.transfers
        while self._requested < len(transfers):
            transfer = transfers[self._requested]
            if (transfer.start, transfer.is_read) != (position, is_read):
                break
            self._requested += 1
            if not self._late:
                self._move()

    def finish(self):
        assert self._requested == self._done == len(self._plan.transfers)

    def _move(self):
        transfer = self._plan.transfers[self._done]
        version = self._plan.versions[transfer.version]
        units = self._place(version)
        assert transfer.slot + len(units) <= self._plan.tier_bytes
        assert version.created == transfer.start
        for unit in units:
            at = transfer.slot + unit - units.start
            if transfer.is_read:
                self._arena[unit] = self._slots[at]
            else:
                self._slots[at] = self._arena[unit]
        self._done += 1


def _run_in_arena(graph, plan, alignment, late):
    outside = _outside(graph)
    arena = [None] * plan.arena_bytes
    reloaded = {t.version for t in plan.transfers if t.is_read}
    versions = {(v.tensor, v.created): v for i, v in enumerate(plan.versions) if i not in reloaded}
    assert len(versions) == len(plan.versions) - len(reloaded)
    back = {}
    for index in sorted(reloaded):
        back.setdefault(plan.versions[index].created, []).append(plan.versions[index])
    values, current = {}, {}

    def place(version):
        tensor = version.tensor
        size = graph.sizes[tensor] if tensor >= 0 else graph.ops[-1 - tensor].workspace
        assert version.offset % alignment == 0
        rounded = -(-size // alignment) * alignment
        assert 0 <= version.offset and version.offset + rounded <= plan.arena_bytes
        return range(version.offset, version.offset + rounded)

    def check(tensor, position):
        assert current[tensor].last_use >= position
        assert all(arena[unit] == values[tensor] for unit in place(current[tensor]))

    def placed(tensor):
        return tensor not in outside and graph.sizes[tensor] > 0

    tier = _Tier(plan, arena, place, late)

    def bring_back(position):
        tier.wait(position)
        for version in back.get(position, ()):
            assert current[version.tensor].last_use < position, "two copies"
            current[version.tensor] = version
        tier.request(position, True)
        tier.wait(position)

    for position, k in enumerate(plan.sequence):
        op = graph.ops[k]
        bring_back(position)
        for t in op.inputs:
            if placed(t) and t in values:
                check(t, position)
        writes = [versions[t, position] for t in op.outputs if placed(t)]
        writes += [versions[-1 - k, position]] if op.workspace else []
        for one, other in itertools.combinations(writes, 2):
            assert not set(place(one)) & set(place(other)), "outputs overlap"
        for version, t in itertools.product(writes, op.inputs):
            if placed(t) and t in values and set(place(version)) & set(place(current[t])):
                assert (t, version.tensor) in op.inplace, "an output overlaps an input"
                assert place(version) == place(current[t]) and current[t].last_use == position
        value = (k, tuple(values.get(t) for t in op.inputs))
        for version in writes:
            for unit in place(version):
                arena[unit] = (value, version.tensor)
            if version.tensor >= 0:
                current[version.tensor] = version
        for t in op.outputs:
            assert values.get(t, (value, t)) == (value, t)
            values[t] = (value, t)
        tier.request(position, False)
    bring_back(len(plan.sequence))
    tier.finish()
    for t, is_output in enumerate(graph.is_output):
        if is_output and placed(t) and t in values:
            check(t, len(plan.sequence))
    ends = [place(v).stop for v in plan.versions]
    assert plan.arena_bytes == max(ends, default=0)


def time_with_transfers(graph, plan, tier):
    """Time of a plan: one transfer at a time, in the order of their requests, beside kernels."""
    now = stalled = free = 0
    ran, done, requests = set(), [], list(plan.transfers)

    def wait(index):
        nonlocal now, stalled
        stalled += max(0, done[index] - now)
        now = max(now, done[index])

    def request(position, is_read):
        nonlocal free
        while requests and (requests[0].start, requests[0].is_read) == (position, is_read):
            if len(done) >= tier.queue:
                wait(len(done) - tier.queue)
            tensor = plan.versions[requests[0].version].tensor
            free = max(free, now) + tier.time_ns(graph.sizes[tensor], is_read)
            done.append(free)
            requests.pop(0)

    def wait_at(position):
        for index in range(len(done)):
            if plan.transfers[index].wait == position:
                wait(index)

    for position in range(len(plan.sequence) + 1):
        wait_at(position)
        request(position, True)
        wait_at(position)
        if position < len(plan.sequence):
            op = graph.ops[plan.sequence[position]]
            again = plan.sequence[position] in ran and op.rerun_ns >= 0
            now += op.rerun_ns if again else op.time_ns
            ran.add(plan.sequence[position])
            request(position, False)
    assert not requests
    return now, stalled


def fastest(graph, budget):
    """Least time within a budget by exhaustion, for plain graphs; None where nothing fits."""
    count = len(graph.ops)
    wanted = {t for t, is_output in enumerate(graph.is_output) if is_output}
    made = {t for op in graph.ops for t in op.outputs}
    heap, done, ticket = [(0, 0, 0, frozenset())], set(), itertools.count(1)
    while heap:
        time, _, following, live = heapq.heappop(heap)
        if (following, live) in done:
            continue
        done.add((following, live))
        if following == count and wanted & made <= live:
            return time
        for k in range(min(following + 1, count)):
            op = graph.ops[k]
            if (k < following and not op.recomputable) or not set(op.inputs) <= live:
                continue
            cost = op.time_ns if k == following or op.rerun_ns < 0 else op.rerun_ns
            after = live | set(op.outputs)
            if sum(graph.sizes[t] for t in after) <= budget:
                state = (max(following, k + 1), after)
                heapq.heappush(heap, (time + cost, next(ticket), *state))
        for t in live:
            heapq.heappush(heap, (time, next(ticket), following, live - {t}))
    return None


def fastest_with_transfers(graph, budget, tier):
    """Least time with a tier by exhaustion, for plain graphs without a bound on the queue.

    A state is what has run, what is there, what is on its way, with the time until it arrives, and
    what has ever been sent.  None where nothing fits.
    """
    count = len(graph.ops)
    made = {t for op in graph.ops for t in op.outputs}
    wanted = frozenset(t for t in made if graph.is_output[t])
    start: tuple[Any, ...] = (0, frozenset(), (), frozenset())
    heap, done, ticket = [(0, 0, start)], set(), itertools.count(1)

    def later(live, pending, passed):
        arrived = {t for rest, is_read, t in pending if is_read and rest <= passed}
        moving = tuple((rest - passed, *what) for rest, *what in pending if rest > passed)
        return live | arrived, moving

    def fits(live, pending):
        return sum(graph.sizes[t] for t in live | {t for _, r, t in pending if r}) <= budget

    while heap:
        time, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        following, live, pending, sent = state
        if following == count and wanted <= live:
            return time
        coming = {t for _, is_read, t in pending if is_read}
        leaving = {t for _, is_read, t in pending if not is_read}
        free = pending[-1][0] if pending else 0
        found = []
        for k in range(min(following + 1, count)):
            op = graph.ops[k]
            if (k < following and not (op.recomputable and tier.recompute)) or coming & {
                *op.outputs
            }:
                continue
            if set(op.inputs) <= live and fits(live | set(op.outputs), pending):
                cost = op.time_ns if k == following or op.rerun_ns < 0 else op.rerun_ns
                after = later(live | set(op.outputs), pending, cost)
                found.append((time + cost, (max(following, k + 1), *after, sent)))
        for t in live - sent:
            if graph.sizes[t] >= tier.least_bytes:
                moving = (*pending, (free + tier.time_ns(graph.sizes[t], False), False, t))
                found.append((time, (following, live, moving, sent | {t})))
        for t in sent - live - coming:
            moving = (*pending, (free + tier.time_ns(graph.sizes[t], True), True, t))
            if fits(live, moving):
                found.append((time, (following, live, moving, sent)))
        found += [(time, (following, live - {t}, pending, sent)) for t in live - leaving]
        if pending:
            after = later(live, pending, pending[0][0])
            found.append((time + pending[0][0], (following, *after, sent)))
        for reached, next_state in found:
            heapq.heappush(heap, (reached, next(ticket), next_state))
    return None
