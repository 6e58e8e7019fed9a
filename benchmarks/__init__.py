"""Measurements against other systems; each module runs as `python -m benchmarks.<name>`."""

from pathlib import Path

from benchmarks.checkout import use

use(Path(__file__).resolve().parents[1])
