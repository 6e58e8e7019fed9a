"""The rest of a plan, planned anew when sizes become known: valid in the same arena, shorter."""

import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from relax_disc.vm_builtins.planner import plan_arena, plan_remainder
from tests.vm_builtins.planner_graphs import random_graph, replay, run_in_arena

SEEDS = st.integers(0, 2**32)


def known_sizes(graph, counter, share, seed):
    """Shrink some of the tensors, and workspaces, that come behind a kernel.

    What may take the place of an input of its size has its size then, too.
    """
    rng = random.Random(seed)
    sizes, ops = list(graph.sizes), list(graph.ops)
    for k in range(counter + 1, len(ops)):
        shrinks = rng.random() < 0.7
        if shrinks:
            ops[k] = replace(ops[k], workspace=int(ops[k].workspace * share))
        for tensor in ops[k].outputs:
            same = [
                sizes[source]
                for source, target in ops[k].inplace
                if target == tensor and graph.sizes[source] == graph.sizes[target]
            ]
            if same:
                sizes[tensor] = same[0]
            elif shrinks:
                sizes[tensor] = int(sizes[tensor] * share)
    return replace(graph, sizes=tuple(sizes), ops=tuple(ops))


def check_rest(graph, plan, known, position):
    """Judge the rest by a replay of the whole program; return it."""
    rest = plan_remainder(known, plan, position)
    assert rest.sequence[: position + 1] == plan.sequence[: position + 1]
    begun = [[(v.tensor, v.created, v.offset) for v in p.versions] for p in (plan, rest)]
    began = [[v for v in versions if v[1] <= position] for versions in begun]
    assert began[0] == began[1]
    assert rest.arena_bytes == plan.arena_bytes
    ends = [
        v.offset + (known.sizes[v.tensor] if v.tensor >= 0 else known.ops[-1 - v.tensor].workspace)
        for v in rest.versions
    ]
    highest = max(ends, default=0)
    assert highest <= plan.arena_bytes
    run_in_arena(known, replace(rest, arena_bytes=highest), alignment=1)
    before = replay(known, plan.sequence)[1]
    if rest.sequence == plan.sequence:
        assert rest == replace(plan, time_ns=rest.time_ns)
    else:
        assert len(rest.sequence) < len(plan.sequence)
        assert rest.time_ns == replay(known, rest.sequence)[1] <= before
    return rest


def tight_plan(graph, part):
    """Plan in the least arena that is found, or a part above it."""
    whole = plan_arena(graph, None, 1, 0)
    plan = plan_arena(graph, 0, 1, 0)
    least = plan.least_bytes if not plan.feasible else 0
    return plan_arena(graph, least + int((whole.arena_bytes - least) * part), 1, 0)


@given(SEEDS, st.floats(0, 1), st.sampled_from([0.0, 0.2, 0.6, 0.95, 1.0]), st.floats(0, 0.9))
@settings(max_examples=150, deadline=None)
@example(7, 0.0, 0.5, 0.0)
def test_the_rest_is_valid_and_no_longer(seed, where, share, part):
    graph = random_graph(seed)
    plan = tight_plan(graph, part)
    counter = int(where * (len(graph.ops) - 1))
    known = known_sizes(graph, counter, share, seed)
    check_rest(graph, plan, known, plan.sequence.index(counter))


def test_nothing_is_computed_again_where_nothing_takes_memory():
    shortened = 0
    for seed in range(300):
        graph = random_graph(seed)
        plan = tight_plan(graph, 0)
        first = set(graph.ops[0].outputs)
        sizes = tuple(size if t in first else 0 for t, size in enumerate(graph.sizes))
        ops = tuple(
            replace(op, workspace=op.workspace if k == 0 else 0) for k, op in enumerate(graph.ops)
        )
        known = replace(graph, sizes=sizes, ops=ops)
        rest = check_rest(graph, plan, known, 0)
        again = [k for i, k in enumerate(rest.sequence) if k in rest.sequence[:i]]
        assert not set(again) - {0}
        shortened += len(rest.sequence) < len(plan.sequence)
    assert shortened > 30


def test_what_was_counted_twice_is_planned_twice():
    shortened = [0, 0]
    for seed in range(200):
        graph = random_graph(seed)
        plan = tight_plan(graph, 0)
        for turn, counter in enumerate((0, len(graph.ops) // 3)):
            known = known_sizes(graph, counter, 0.6, seed)
            rest = check_rest(graph, plan, known, plan.sequence.index(counter))
            shortened[turn] += len(rest.sequence) < len(plan.sequence)
            graph, plan = known, rest
    assert min(shortened) > 5
