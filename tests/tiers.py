"""Parameters of a test that the fast tier runs some of, and the whole tier all."""

from collections.abc import Iterable
from typing import Any

import pytest


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Leave all values but one of ``step`` to the whole tier, the first being fast."""
    return [value if index % step == 0 else slow(value) for index, value in enumerate(values)]


def slow(value: Any) -> Any:
    """Leave a value, or a `pytest.param`, to the whole tier."""
    known = value if isinstance(value, type(pytest.param())) else pytest.param(value)
    return pytest.param(*known.values, marks=[*known.marks, pytest.mark.slow], id=known.id)
