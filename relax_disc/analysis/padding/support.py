"""Where a tensor can be other than zero: which of its rows a sum over them asks for.

A *support* is a set of conditions on a row, as :mod:`relax_disc.analysis.padding.values` writes
them: the tensor is zero in every row for which none of them holds.  The gradient of a cross-entropy
has the condition that the label counts; what is multiplied by a mask has the mask.  ``NEEDED`` is
the condition that a row is needed, whatever for; None says that nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_disc.analysis.padding.values import Value, is_readable, is_truth, simplify

Support = frozenset[Any] | None

NEEDED: Value = ("needed",)
NOWHERE: Support = frozenset()
AT_NEEDED: Support = frozenset({NEEDED})


def in_any(supports: Sequence[Support]) -> Support:
    """Support of a sum: wherever one of the parts may be other than zero."""
    found: frozenset[Any] = frozenset()
    for support in supports:
        if support is None:
            return None
        found |= support
    return found


def in_all(supports: Sequence[Support]) -> Support:
    """Support of a product: where none of the factors is known to be zero."""
    known = sorted({each for each in supports if each is not None}, key=_rank)
    if not known or known[0] in (NOWHERE, AT_NEEDED) or len(known[0]) > 1:
        return known[0] if known else None
    single = {condition for each in known if len(each) == 1 for condition in each}
    # Nested conditions are laid open, so that equal products have equal conditions.
    parts = {part for each in single for part in (each[1:] if each[0] == "and" else (each,))}
    return frozenset({_conjunction(sorted(parts, key=repr))})


def _rank(support: frozenset[Any]) -> tuple[int, int, str]:
    # Rows that are needed in any case ask for no others.
    return (0 if support == AT_NEEDED else 1, len(support), repr(sorted(map(repr, support))))


def _conjunction(parts: Sequence[Value]) -> Value:
    return parts[0] if len(parts) == 1 else ("and", *parts)


def support_of(value: Value) -> Support:
    """Find where an element is other than zero, or true."""
    if not isinstance(value, tuple):
        return NOWHERE if value == 0 else None
    kind, *parts = value
    if kind in ("truth", "rounded"):
        return support_of(parts[0])
    if kind in ("mul", "and"):
        return in_all([support_of(part) for part in parts])
    if kind == "choose":
        condition, yes, no = parts
        opposite = simplify(("not", condition))
        sides = ((condition, yes), (opposite, no))
        return in_any([in_all([_where(when), support_of(side)]) for when, side in sides])
    return _where(value)


def _where(value: Value) -> Support:
    """The rows for which an expression that can be read is true, or not zero."""
    if not is_readable(value):
        return None
    return frozenset({value if is_truth(value) else simplify(("truth", value))})
