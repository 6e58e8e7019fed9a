"""The page of operators is what the code says."""

import subprocess
import sys

from relax_disc.frontend.converters import TABLE


def test_the_page_is_up_to_date(repository):
    # A process of its own, as `make docs` is: other tests register operators with PyTorch.
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.operators.document"]
    written = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, cwd=repository
    ).stdout
    assert (repository / "docs" / "operators.md").read_text() == written, "run `make docs`"
    assert all(f"`{operator}`" in written for operator in TABLE)
