"""Random training programs: every step equals eager's or is refused with nothing written."""

from __future__ import annotations

import pytest

from tests.training.fuzz_programs import run

LOOPS = 4
# Eager warns of sizes that differ, variances of one value, hooks without gradients, schedules, ...
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("first", range(0, 25, 5))
def test_programs(first):
    assert sum(run(seed, LOOPS) for seed in range(first, first + 5)) == 5 * LOOPS


@pytest.mark.slow
@pytest.mark.parametrize("first", range(25, 505, 10))
def test_more_programs(first):
    assert sum(run(seed, LOOPS) for seed in range(first, first + 10)) == 10 * LOOPS
