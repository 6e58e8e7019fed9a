"""plan_offsets: MiniMalloc's problems, random ones, equal results of C++ and Python, errors."""

import csv
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_disc.analysis.memory.offsets import plan_offsets
from relax_disc.errors import GraphError
from relax_disc.vm_builtins import native, offsets_twin
from relax_disc.vm_builtins.offsets_twin_search import Restarts

CAPACITY = 1048576


def read_problem(path):
    with path.open() as stream:
        rows = [[int(value) for value in row[1:]] for row in list(csv.reader(stream))[1:]]
    return tuple(zip(*rows, strict=True))


def check(lower, upper, size, offsets, height):
    """No two buffers overlap in time and space; the height is the highest end."""
    assert all(offset >= 0 for offset in offsets)
    real = [i for i in range(len(size)) if size[i] > 0 and lower[i] < upper[i]]
    for i, j in itertools.combinations(real, 2):
        together = lower[i] < upper[j] and lower[j] < upper[i]
        apart = offsets[i] + size[i] <= offsets[j] or offsets[j] + size[j] <= offsets[i]
        assert apart or not together
    taken = [o + s for b, e, o, s in zip(lower, upper, offsets, size, strict=True) if s and b < e]
    assert height == max(taken, default=0)


def load(lower, upper, size):
    return max(
        sum(s for b, e, s in zip(lower, upper, size, strict=True) if b <= t < e) for t in set(lower)
    )


def random_problem(seed, count=30):
    rng = random.Random(seed)
    lower = [rng.randint(0, 20) for _ in range(rng.randint(0, count))]
    upper = [begin + rng.randint(0, 8) for begin in lower]
    return lower, upper, [rng.randint(0, 12) for _ in lower]


@pytest.mark.parametrize("name", "ABCDF")
def test_published_problems_fit(shared, name):
    if native.load() is None:
        pytest.skip("minutes without a C++ compiler")
    problem = read_problem(shared / "graphs" / "minimalloc" / f"{name}.1048576.csv")
    offsets, height = plan_offsets(*problem, CAPACITY)
    check(*problem, offsets, height)
    assert height <= CAPACITY


@pytest.mark.slow
def test_hardest_published_problem_fits(shared):
    problem = read_problem(shared / "graphs" / "minimalloc" / "E.1048576.csv")
    offsets, height = plan_offsets(*problem, CAPACITY)
    check(*problem, offsets, height)
    assert height <= CAPACITY


def test_example_of_the_paper(shared):
    problem = read_problem(shared / "graphs" / "minimalloc" / "input.12.csv")
    offsets, height = plan_offsets(*problem)
    check(*problem, offsets, height)
    assert height == 12


@given(seed=st.integers(0, 2**32), spare=st.sampled_from([None, 0, 1, 3]))
def test_random_problems(seed, spare):
    problem = random_problem(seed)
    bound = load(*problem) if problem[0] else 0
    best = plan_offsets(*problem)
    check(*problem, *best)
    assert bound <= best[1] <= 1.2 * bound + 1
    if spare is not None and best[1] <= bound + spare:
        offsets, height = plan_offsets(*problem, bound + spare)
        check(*problem, offsets, height)
        assert height <= bound + spare
        assert (offsets, height) == offsets_twin.plan_offsets(*problem, bound + spare)


def test_python_searches_alike():
    """Problems that greedy placement does not solve, so that both go through the search."""
    found = 0
    for seed in range(400):
        lower, upper, size = problem = random_problem(seed, count=14)
        if not size:
            continue
        graph = offsets_twin.make_problem(lower, upper, size)
        offsets, _ = offsets_twin.search_offsets(graph, graph.lower_bound, 20_000)
        if offsets is not None:
            found += 1
            check(lower, upper, size, *offsets_twin.plan_offsets(*problem, graph.lower_bound))
            assert plan_offsets(*problem, graph.lower_bound) == offsets_twin.plan_offsets(
                *problem, graph.lower_bound
            )
    assert found > 200


def cut_apart(random, pieces, span=64, height=4096):
    """Buffers that fill a rectangle without a gap, made by cutting it again and again."""
    parts = [(0, span, height)]
    while len(parts) < pieces:
        begin, end, size = parts.pop(random.randrange(len(parts)))
        if end - begin > 1 and random.random() < 0.5:
            at = random.randrange(begin + 1, end)
            parts += [(begin, at, size), (at, end, size)]
        elif size > 1:
            at = random.randrange(1, size)
            parts += [(begin, end, at), (begin, end, size - at)]
        else:
            parts.append((begin, end, size))
    random.shuffle(parts)
    return tuple(zip(*parts, strict=True))


@pytest.mark.parametrize("fills_tight", [False, True])
def test_each_search_finds_perfect_packings(fills_tight):
    """Without slack anywhere, so that the second search fills a floor at every step."""
    for seed in range(30):
        problem = cut_apart(random.Random(seed), 24)
        graph = offsets_twin.make_problem(*map(list, problem))
        runs = Restarts(graph, 4096, 6, fills_tight=fills_tight)
        orders = [list(range(24)), sorted(range(24), key=lambda i: problem[2][i])]
        assert any(runs.run(orders) for _ in range(40))
        check(*(list(part) for part in problem), runs.search.offsets, 4096)
        assert plan_offsets(*problem, 4096) == offsets_twin.plan_offsets(*problem, 4096)


def test_too_small_a_capacity_is_told():
    lower, upper, size = [0, 0], [2, 2], [5, 6]
    assert plan_offsets(lower, upper, size, 10)[1] == 11
    assert plan_offsets([], [], []) == ([], 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [1, 2], [3]), "same buffers"),
        (([2], [1], [3]), r"lives in \[2, 1\)"),
        (([0], [1], [-3]), "size -3"),
        (([0], [1], [3], -1), "capacity is -1"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(GraphError, match=message):
        plan_offsets(*arguments)
