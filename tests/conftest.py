"""Settings that every test shares: threads, hypothesis profiles, the folder of shared data."""

import os
import signal
from pathlib import Path

# Before torch and OpenBLAS start their threads.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Other tests want the cores on which OpenMP would wait in a loop.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Else results and planned memory would depend on a measurement of the machine.
os.environ.setdefault("RELAX_DISC_PRODUCTS", "own")

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.checkout import use
from tests import tiers

# A shell that starts the tests in the background has them ignore SIGINT, which some of them raise.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parents[1]

use(REPOSITORY)

_COMMON = {
    # A generated example may compile something; how long that takes is no property of the code.
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("fast", max_examples=200, **_COMMON)
settings.register_profile("full", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_collection_modifyitems(items):
    steps = tiers.read_steps(tiers.LONG.read_text())
    tiers.leave_to_the_whole_tier(items, steps, REPOSITORY)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of shared data beside or in the checkout; tests that need it skip without it."""
    for folder in (REPOSITORY.parent / "shared", REPOSITORY / "shared"):
        if (folder / "design.md").is_file():
            return folder
    pytest.skip("the folder of shared data is not here")
