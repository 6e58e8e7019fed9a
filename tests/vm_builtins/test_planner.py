"""Plans of the planner: valid, within budget, monotone, near the best, the same every time."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_disc.vm_builtins.planner import (
    PlannerGraph,
    PlannerOp,
    TierModel,
    plan_arena,
    plan_rematerialization,
)
from relax_disc.vm_builtins.runtime import function
from tests.vm_builtins.planner_graphs import (
    ALIGNMENT,
    fastest,
    fastest_with_transfers,
    random_graph,
    replay,
    run_in_arena,
    there_and_back,
    time_with_transfers,
)

SEEDS = st.integers(0, 2**32)
PARTS = st.floats(0, 1.05)


def resident_bytes(graph):
    return sum(s for s, stays in zip(graph.sizes, graph.resident, strict=True) if stays)


def check_at(seed, part, effort):
    """At any budget: valid and within it, or refused, naming one that is enough; the same twice."""
    graph = random_graph(seed)
    whole = plan_arena(graph, None, ALIGNMENT, 0)
    budget = int(whole.arena_bytes * part)
    plan = plan_arena(graph, budget, ALIGNMENT, effort)
    if plan.feasible:
        run_in_arena(graph, plan)
        assert plan.arena_bytes <= budget
        assert plan.time_ns == replay(graph, plan.sequence)[1] >= whole.time_ns
    else:
        assert not plan.sequence and budget < plan.least_bytes
        assert plan_arena(graph, plan.least_bytes, ALIGNMENT, effort).feasible
    budget += resident_bytes(graph)
    program = plan_rematerialization(graph, budget, effort)
    if program.feasible:
        assert (program.peak_bytes, program.time_ns) == replay(graph, program.sequence)
        assert program.lower_bound_bytes <= program.peak_bytes <= budget
        assert program.least_bytes == 0
    else:
        assert not program.sequence and budget < program.least_bytes
        assert plan_rematerialization(graph, program.least_bytes, effort).feasible
    assert plan == plan_arena(graph, budget - resident_bytes(graph), ALIGNMENT, effort)
    assert program == plan_rematerialization(graph, budget, effort)


def check_plans(seed, effort):
    """Every plan down a ladder of budgets is valid, and time only grows."""
    graph = random_graph(seed)
    whole = plan_arena(graph, None, ALIGNMENT, effort)
    run_in_arena(graph, whole)
    assert whole.time_ns == sum(op.time_ns for op in graph.ops)
    time, budget = whole.time_ns, whole.arena_bytes
    for step in range(11, -1, -1):
        plan = plan_arena(graph, budget * step // 12, ALIGNMENT, effort)
        if not plan.feasible:
            assert plan.least_bytes > budget * step // 12
            plan = plan_arena(graph, plan.least_bytes, ALIGNMENT, effort)
            assert plan.feasible
        run_in_arena(graph, plan)
        assert plan.lower_bound_bytes <= plan.live_peak_bytes <= plan.arena_bytes
        assert plan.time_ns == replay(graph, plan.sequence)[1] >= time
        time = plan.time_ns


TIERS = st.builds(
    TierModel,
    write_bytes_per_ns=st.sampled_from([0.5, 3.0, 40.0]),
    read_bytes_per_ns=st.sampled_from([0.5, 3.0, 40.0]),
    latency_ns=st.sampled_from([0, 1, 7]),
    least_bytes=st.sampled_from([1, 20]),
    queue=st.sampled_from([1, 2, 64]),
    recompute=st.booleans(),
)


def check_offloading(seed, effort, tier, part):
    """A plan with a tier is valid, takes the time it says, and is no slower than without one."""
    sizes = random_graph(seed)
    rounded = tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.sizes)
    graph = replace(sizes, sizes=rounded)
    whole = plan_arena(graph, None, ALIGNMENT, effort, tier)
    assert not whole.transfers and whole.time_ns == sum(op.time_ns for op in graph.ops)
    budget = int(whole.arena_bytes * part)
    plan, alone = (plan_arena(graph, budget, ALIGNMENT, effort, t) for t in (tier, None))
    assert plan == plan_arena(graph, budget, ALIGNMENT, effort, tier)
    if not plan.feasible:
        assert budget < plan.least_bytes
        assert not (tier.recompute and alone.feasible)
        plan = plan_arena(graph, plan.least_bytes, ALIGNMENT, effort, tier)
        assert plan.feasible
        budget = plan.arena_bytes
    run_in_arena(graph, plan)
    assert plan.lower_bound_bytes <= plan.live_peak_bytes <= plan.arena_bytes <= budget
    assert (plan.time_ns, plan.stall_ns) == time_with_transfers(graph, plan, tier)
    if alone.feasible and tier.recompute:
        assert plan.time_ns <= alone.time_ns
    if not tier.recompute:
        assert plan.sequence == tuple(range(len(graph.ops)))


def check_programs(seed, effort):
    graph = random_graph(seed)
    resident = resident_bytes(graph)
    whole = plan_rematerialization(graph, None, effort)
    assert whole.sequence == tuple(range(len(graph.ops)))
    time = whole.time_ns
    for step in range(11, -1, -1):
        budget = resident + (whole.peak_bytes - resident) * step // 12
        program = plan_rematerialization(graph, budget, effort)
        if not program.feasible:
            assert program.least_bytes > budget
            budget = program.least_bytes
            program = plan_rematerialization(graph, budget, effort)
        assert (program.peak_bytes, program.time_ns) == replay(graph, program.sequence)
        assert program.lower_bound_bytes <= program.peak_bytes <= budget
        assert program.time_ns >= time
        time = program.time_ns


@given(seed=SEEDS, part=PARTS, effort=st.sampled_from([0, 0, 1]))
def test_plans_hold_at_any_budget(seed, part, effort):
    check_at(seed, part, effort)


@given(seed=SEEDS, effort=st.sampled_from([0, 1]))
def test_arena_plans_hold(seed, effort):
    check_plans(seed, effort)


def test_what_cannot_run_again_can_be_reloaded():
    """Four random values, all read at the end: with a tier one of them is there at a time."""
    ops = [PlannerOp(5, -1, 0, (), (k,), (), False) for k in range(4)]
    ops += [PlannerOp(5, -1, 0, (3 - k,), ()) for k in range(4)]
    graph = PlannerGraph((8,) * 4, (False,) * 4, (False,) * 4, tuple(ops))
    assert plan_arena(graph, 0, ALIGNMENT, 0).least_bytes == 32
    tier = TierModel(1.0, 1.0)
    plan = plan_arena(graph, 8, ALIGNMENT, 0, tier)
    assert plan.feasible and sum(t.is_read for t in plan.transfers) == 3
    run_in_arena(graph, plan)
    assert plan_arena(graph, 24, ALIGNMENT, 0, tier).time_ns < plan.time_ns


def check_choices(seeds):
    """Against exhaustion over keeping, computing again and reloading."""
    solved = exact = reloads = again = 0
    for seed, part in itertools.product(range(seeds), (0.6, 0.8)):
        graph = there_and_back(seed)
        tier = TierModel(2.0 + seed % 3, 2.0, 1, recompute=seed % 4 != 0)
        whole = plan_arena(graph, None, ALIGNMENT, 1)
        budget = int(whole.live_peak_bytes * part)
        best = fastest_with_transfers(graph, budget, tier)
        plan = plan_arena(graph, budget, ALIGNMENT, 1, tier)
        assert plan.feasible == (best is not None)
        if best is None:
            continue
        assert best <= plan.time_ns <= 1.15 * best
        solved += 1
        exact += plan.time_ns == best
        reloads += sum(t.is_read for t in plan.transfers)
        again += len(plan.sequence) - len(graph.ops)
    assert exact >= 0.6 * solved
    assert reloads
    return again


def test_choices_are_near_the_best():
    check_choices(4)


@pytest.mark.slow
def test_choices_are_near_the_best_of_many_graphs():
    assert check_choices(40)


@given(seed=SEEDS, effort=st.sampled_from([0, 1]), tier=TIERS, part=PARTS)
def test_plans_with_a_tier_hold(seed, effort, tier, part):
    check_offloading(seed, effort, tier, part)


@pytest.mark.slow
@settings(max_examples=2000)
@given(seed=SEEDS, tier=TIERS, part=PARTS)
def test_plans_with_a_tier_hold_on_many_graphs(seed, tier, part):
    check_offloading(seed, 0, tier, part)


@given(seed=SEEDS, effort=st.sampled_from([0, 1]))
def test_programs_hold(seed, effort):
    check_programs(seed, effort)


@pytest.mark.slow
@settings(max_examples=1200)
@given(seed=SEEDS, part=PARTS)
def test_plans_hold_at_any_budget_on_many_graphs(seed, part):
    for effort in (0, 1):
        check_at(seed, part, effort)


@pytest.mark.slow
@settings(max_examples=1200)
@given(seed=SEEDS)
def test_plans_hold_on_many_graphs(seed):
    check_plans(seed, 0)
    check_programs(seed, 1)


def exhausted(seeds):
    """Graphs small enough for exhaustion, tight budgets, and their plans without a budget."""
    for seed in range(seeds):
        graph = random_graph(seed, most=8, plain=True)
        whole = plan_rematerialization(graph, None, 1)
        for part in (0.7, 0.8, 0.9):
            yield graph, int(whole.peak_bytes * part), whole


def test_near_the_optimum_of_small_graphs():
    """Against exhaustion: never better, the bound proved, and seldom worse."""
    exact = found = solved = 0
    for graph, budget, _ in exhausted(300):
        best = fastest(graph, budget)
        program = plan_rematerialization(graph, budget, 1)
        if best is None:
            assert not program.feasible
            continue
        assert budget >= program.lower_bound_bytes
        solved += 1
        if program.feasible:
            assert program.time_ns >= best
            found += 1
            exact += program.time_ns == best
    assert solved >= 50
    assert found >= 0.95 * solved
    assert exact >= 0.88 * found


def test_a_front_bounds_the_time():
    """The knapsack at the peak never says more than exhaustion finds."""
    useful = 0
    for graph, budget, whole in exhausted(150):
        best = fastest(graph, budget)
        if best is None:
            continue
        bound = function("relax_disc.least_time_ns")(graph.lists(), budget)
        assert bound <= best
        useful += whole.time_ns < bound
    assert useful >= 25


def test_effort_only_helps():
    for seed in range(40):
        graph = random_graph(seed)
        whole = plan_rematerialization(graph, None, 0)
        budget = whole.peak_bytes * 2 // 3
        plans = [plan_rematerialization(graph, budget, effort) for effort in (0, 1)]
        times = [plan.time_ns for plan in plans if plan.feasible]
        assert times == sorted(times, reverse=True)
        assert [plan.feasible for plan in plans] == sorted(plan.feasible for plan in plans)


def test_a_graph_that_is_no_graph_is_refused():
    plan = function("relax_disc.plan_arena")
    op = (1, -1, 0, True, (0,), (3,), ())
    for graph, error, message in (
        ([[1]], IndexError, "out of bound"),
        ([[1, 2], [0], [0, 0], []], ValueError, "2 sizes, 1 and 2 flags"),
        ([[1], [0], [0], [op]], ValueError, "op 0 has tensor 3 of 1"),
    ):
        with pytest.raises(error, match=message):
            plan(graph, -1, ALIGNMENT, 0, ())


@given(seed=SEEDS, effort=st.sampled_from([0, 1]))
def test_every_refusal_names_the_same_least(seed, effort):
    """It is where refusals end, so that asking at any budget tells it."""
    graph = random_graph(seed)
    least = plan_arena(graph, 0, ALIGNMENT, effort).least_bytes
    for budget in (least // 3, least * 2 // 3, least - ALIGNMENT, least - 1):
        if budget >= 0:
            plan = plan_arena(graph, budget, ALIGNMENT, effort)
            assert (plan.feasible, plan.least_bytes) == (False, least)
    assert plan_arena(graph, least, ALIGNMENT, effort).feasible
