"""Values that a step may read and must leave as they are: what they held before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Kept:
    """A value, its members if it is a container, and all that it holds."""

    value: Any
    members: list[Any] | None
    held: Any


def copied(value: Any) -> Kept:
    """Note what a value is before a step."""
    members = list(value) if type(value) in (list, dict, set) else None
    is_held = isinstance(value, list | dict | tuple)
    return Kept(value, members, pytree.tree_leaves(value) if is_held else value)


def unchanged(one: Kept, other: Kept) -> bool:
    """Whether two states of a value are the same object with the same members."""
    if type(one.value) is not type(other.value):
        return False
    for left, right in ((one.members, other.members), (one.held, other.held)):
        if isinstance(left, list) and isinstance(right, list) and left is not right:
            if len(left) != len(right) or any(a is not b for a, b in zip(left, right, strict=True)):
                return False
        elif left is not right and not _equal_numbers(left, right):
            return False
    return True


def _equal_numbers(left: Any, right: Any) -> bool:
    plain = (bool, int, float, str, type(None))
    return type(left) in plain and type(left) is type(right) and left == right
