"""Random planner graphs and checkers of plans that share nothing with the planners."""

import heapq
import itertools
import random

from benchmarks.planner_peak import planner_peak
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
    """Run a plan over an arena of units that hold what was written; check every read."""
    _check_runs(graph, plan.sequence)
    outside = _outside(graph)
    arena = [None] * plan.arena_bytes
    versions = {(v.tensor, v.created): v for v in plan.versions}
    assert len(versions) == len(plan.versions)
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

    for position, k in enumerate(plan.sequence):
        op = graph.ops[k]
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
    for t, is_output in enumerate(graph.is_output):
        if is_output and placed(t) and t in values:
            check(t, len(plan.sequence))
    ends = [place(v).stop for v in plan.versions]
    assert plan.arena_bytes == max(ends, default=0)


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
