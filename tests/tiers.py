"""Which long tests the fast tier runs: parameters here and there, and the list `long.txt`."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

LONG = Path(__file__).with_name("long.txt")

Steps = Mapping[str, Mapping[str, int]]
"""By file, then by test: of how many parameter sets the fast tier runs one; 0 for none."""


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Leave all values but one of ``step`` to the whole tier, the first being fast."""
    return [value if index % step == 0 else slow(value) for index, value in enumerate(values)]


def slow(value: Any) -> Any:
    """Leave a value, or a `pytest.param`, to the whole tier."""
    known = value if isinstance(value, type(pytest.param())) else pytest.param(value)
    return pytest.param(*known.values, marks=[*known.marks, pytest.mark.slow], id=known.id)


def read_steps(text: str) -> Steps:
    """Read `long.txt`: lines of files, each followed by lines of its tests, indented."""
    steps: dict[str, dict[str, int]] = {}
    tests: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith(" "):
            tests = steps.setdefault(line.strip(), {})
            continue
        entry = re.fullmatch(r"\s+(\d+) (test_\w+)", line)
        if entry is None or entry[1] == "1":
            raise pytest.UsageError(f"{LONG.name}:{number} is no '<0, or 2 and more> <test>'.")
        if entry[2] in tests:
            raise pytest.UsageError(f"{LONG.name}:{number} lists {entry[2]} a second time.")
        tests[entry[2]] = int(entry[1])
    return steps


def leave_to_the_whole_tier(items: Iterable[pytest.Item], steps: Steps, root: Path) -> None:
    """Mark as slow what the fast tier leaves out of the tests that were collected.

    Raises `pytest.UsageError`: a test that is listed is not there.
    """
    for file, tests in steps.items():
        source = (root / file).read_text() if (root / file).is_file() else ""
        for name in tests:
            if re.search(rf"^def {name}\(", source, re.MULTILINE) is None:
                raise pytest.UsageError(f"{LONG.name} lists {file}::{name}, which is not there.")
    seen: Counter[tuple[str, str]] = Counter()
    for item in items:
        file = item.path.relative_to(root).as_posix() if item.path.is_relative_to(root) else ""
        name = getattr(item, "originalname", item.name)
        step = steps.get(file, {}).get(name)
        if step is None or item.get_closest_marker("slow") is not None:
            continue
        if step == 0 or seen[file, name] % step:
            item.add_marker(pytest.mark.slow)
        seen[file, name] += 1
