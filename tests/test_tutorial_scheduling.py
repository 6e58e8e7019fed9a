"""The tutorial of the scheduler runs, and its step is proved optimal."""

import os
import subprocess
import sys


def test_scheduling_tutorial(repository):
    script = repository / "tutorials" / "scheduling.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "optimal: True" in done.stdout
    assert "live bytes are the maximum of:" in done.stdout
