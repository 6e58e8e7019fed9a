"""The table of translated operators: an operator that is not in it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_disc.frontend.emitter import Emitter

Converter = Callable[..., Any]

WIDE = {"bfloat16": "float32", "float16": "float32"}
"""Types whose sums are kept in a wider one."""

TABLE: dict[str, Converter] = {}
"""From the full name of an operator, ``"aten.add.Tensor"``, to its converter."""


def converts(*operators: str) -> Callable[[Converter], Converter]:
    """Enter a converter into the table.

    A converter is called with the emitter and with the operator's own arguments, tensors replaced
    by Relax expressions and symbolic sizes by TVM's; it returns an expression, or a tuple of them.
    """

    def enter(converter: Converter) -> Converter:
        for operator in operators:
            if operator in TABLE:
                raise ValueError(f"{operator} has two converters.")
            TABLE[operator] = converter
        return converter

    return enter


def axis_of(emitter: Emitter, x: Any, axis: int) -> int:
    """Return a non-negative axis."""
    rank = len(emitter.shape(x))
    return axis + max(rank, 1) if axis < 0 else axis


def axes_of(emitter: Emitter, x: Any, axes: Any) -> list[int]:
    """Return non-negative axes; none or an empty list means all of them."""
    if axes is None or (not isinstance(axes, int) and len(axes) == 0):
        return list(range(len(emitter.shape(x))))
    return [axis_of(emitter, x, a) for a in ([axes] if isinstance(axes, int) else axes)]
