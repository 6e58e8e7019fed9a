"""Cuts against all sets of ops that may have run, on graphs small enough to list them."""

import random
from dataclasses import replace

import pytest

from relax_disc.analysis.schedule.problem import problem_of
from relax_disc.analysis.schedule.split import split_search
from relax_disc.vm_builtins.runtime import function
from tests.analysis.tensor_graphs import irregular_graph, small_graph


def states(problem, op):
    """All legal sets of ops done before `op`, each with the live bytes while `op` runs."""
    free = [k for k in range(problem.ops) if k != op]
    for mask in range(1 << len(free)):
        done = {k for bit, k in enumerate(free) if mask >> bit & 1}
        if any(not set(problem.need[k]) <= done for k in done) or not set(problem.need[op]) <= done:
            continue
        if any(op in problem.need[k] for k in done):
            continue
        live = problem.base[0] + problem.extra[0][op]
        for buffer, users in enumerate(problem.users):
            begun = problem.ready[buffer] or any(k in done or k == op for k in users)
            needed = problem.stays[buffer] or any(k not in done for k in users)
            if begun and needed:
                live += problem.size[0][buffer]
        yield done, live


def small_problem(seed):
    graph = small_graph(seed)
    kernels = graph.kernels[:9]
    made = {tensor for kernel in kernels for tensor in kernel.outputs}
    needed = {tensor for kernel in graph.kernels[9:] for tensor in kernel.inputs}
    outputs = tuple(sorted(made & (needed | set(graph.outputs))))
    return problem_of(replace(graph, kernels=kernels, outputs=outputs))


BEFORE, AFTER = 1, 2


def least_cut(problem, op, late=False, force=()):
    return function("relax_disc.schedule.least_cut")(problem.lists(), 0, op, late, list(force))


def test_cut_is_the_least_over_all_states():
    for seed in range(40):
        problem = small_problem(seed)
        rng = random.Random(seed)
        op = rng.randrange(problem.ops)
        possible = list(states(problem, op))
        least = min(live for _, live in possible)
        best = [done for done, live in possible if live == least]
        early, late = (least_cut(problem, op, late) for late in (False, True))
        assert early["bytes"] == late["bytes"] == least
        sides = [{k for k, flag in enumerate(cut["done"]) if flag} - {op} for cut in (early, late)]
        assert sides[0] == set.intersection(*best) and sides[1] == set.union(*best)


def test_forced_sides():
    for seed in range(60):
        problem = small_problem(seed)
        rng = random.Random(seed)
        op, other = rng.sample(range(problem.ops), 2)
        for side in (BEFORE, AFTER):
            live = [
                live for done, live in states(problem, op) if (other in done) == (side == BEFORE)
            ]
            cut = least_cut(problem, op, force=[(other, side)])
            assert bool(cut) == bool(live)
            if live:
                assert cut["bytes"] == min(live)


@pytest.mark.slow
def test_work_limit_holds():
    problem = problem_of(irregular_graph(5, 3000, 1000.0))
    for work in (10**6, 10**8):
        found = split_search(problem, work=work, seconds=600.0)
        assert found.work <= 1.2 * work + 10**7 and not found.timed_out
