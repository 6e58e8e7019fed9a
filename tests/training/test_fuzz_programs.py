"""Random training programs: every step equals eager's or is refused with nothing written."""

from __future__ import annotations

import pytest

from tests.training.fuzz_programs import run

LOOPS = 4
# Batches whose sizes differ make eager warn.
pytestmark = pytest.mark.filterwarnings("ignore:Using a target size", "ignore:.*lr_scheduler")


@pytest.mark.parametrize("first", range(0, 25, 5))
def test_programs(first):
    assert sum(run(seed, LOOPS) for seed in range(first, first + 5)) == 5 * LOOPS


@pytest.mark.slow
@pytest.mark.parametrize("first", range(25, 505, 10))
def test_more_programs(first):
    assert sum(run(seed, LOOPS) for seed in range(first, first + 10)) == 10 * LOOPS
