"""plan_offsets: MiniMalloc's problems, random ones against exhaustion, perfect packings, errors."""

import csv
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_disc.analysis.memory.offsets import plan_offsets
from relax_disc.errors import GraphError
from relax_disc.vm_builtins.runtime import function

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
        assert (offsets, height) == plan_offsets(*problem, bound + spare)


def fits(lower, upper, size, height):
    """Whether any placement stays within a height, by trying all.

    Dropped in the order of their offsets, the buffers of a placement fall onto one another or the
    ground and end no higher: so all orders are tried in which offsets do not fall.
    """
    count = len(size)
    overlaps = [
        [j for j in range(count) if lower[i] < upper[j] and lower[j] < upper[i]]
        for i in range(count)
    ]

    def place(tops, last):
        if len(tops) == count:
            return True
        for i in set(range(count)) - tops.keys():
            at = max((tops[j] for j in overlaps[i] if j in tops), default=0)
            if (
                (at, i) > last
                and at + size[i] <= height
                and place({**tops, i: at + size[i]}, (at, i))
            ):
                return True
        return False

    return place({}, (-1, -1))


def full_problem(rng, height, steps):
    """Buffers of which those alive fill the height at every step; most, not all, can be packed."""
    lower, upper, size, alive = [], [], [], []
    for step in range(steps):
        gone = rng.sample(alive, rng.randint(1, len(alive))) if alive else []
        for buffer in gone:
            upper[buffer] = step
            alive.remove(buffer)
        left = sum(size[buffer] for buffer in gone) if step else height
        while left:
            alive.append(len(size))
            lower.append(step)
            upper.append(steps)
            size.append(rng.randint(1, left))
            left -= size[-1]
    return lower, upper, size


def test_small_problems_against_all_placements():
    """What does not reach the load has no placement that does."""
    above = 0
    for seed in range(6000):
        problem = full_problem(random.Random(seed), 4 + seed % 4, 7)
        if len(problem[2]) <= 14:
            offsets, height = plan_offsets(*problem)
            check(*problem, offsets, height)
            if height > load(*problem):
                above += 1
                assert not fits(*problem, height - 1)
    assert above >= 3


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
    search = function("relax_disc.search_offsets")
    for seed in range(30):
        problem = cut_apart(random.Random(seed), 24)
        offsets = search(*problem, 4096, 10**7, fills_tight)
        check(*problem, offsets, 4096)
        best = plan_offsets(*problem, 4096)
        check(*problem, *best)
        assert best[1] == 4096


def test_each_search_finds_what_fits():
    """Random problems at their lower bound: what is found is valid, and much is found."""
    found = 0
    search = function("relax_disc.search_offsets")
    for seed in range(400):
        problem = random_problem(seed, count=14)
        real = [i for i, size in enumerate(problem[2]) if size and problem[0][i] < problem[1][i]]
        problem = [[part[i] for i in real] for part in problem]
        if not real:
            continue
        bound = load(*problem)
        for fills_tight in (False, True):
            offsets = search(*problem, bound, 20_000, fills_tight)
            if offsets:
                found += 1
                check(*problem, offsets, bound)
    assert found > 400


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
