"""What the user's code can assign anew: kept before it runs, and put back afterwards."""

from __future__ import annotations

import collections
import contextlib
import types
from typing import Any

from relax_disc.frontend.capture.state.kinds import (
    NAMESPACES,
    is_foreign,
    is_library,
    is_listed,
)
from relax_disc.frontend.capture.state.reachable import Reachable
from relax_disc.frontend.capture.state.sources import Source

Kept = tuple[str, Source, Any, Any]
"""What a thing is (``"buffers"``; attributes of an object: ``"attributes"``, ``"settings"`` where a
library defines its class, ``"internal"`` where PyTorch, Python or its like does; ``"container"`` or
``"variable"``), where it lies, the thing itself, and what it held."""
ATTRIBUTES = ("attributes", "settings")


def snapshot(known: Reachable) -> list[Kept]:
    """Keep what the walk has found: tables, attributes, containers and variables."""
    saved: list[Kept] = []
    for source, module in known.modules.values():
        saved.append(("buffers", source, module._buffers, dict(module._buffers)))
        kind = "internal" if is_foreign(type(module).__module__) else _kind_of(module)
        saved.append((kind, source, module.__dict__, dict(module.__dict__)))
    for source, value in known.containers:
        if isinstance(value, dict):
            saved.append(("container", source, value, dict(dict.items(value))))
        elif is_listed(value):
            saved.append(("container", source, value, value.copy()))
        if hasattr(value, "__dict__"):
            of_python = type(value) in (*NAMESPACES, types.FunctionType)
            strange = is_foreign(type(value).__module__) and not of_python
            kind = "internal" if strange else _kind_of(value)
            saved.append((kind, source, value.__dict__, dict(value.__dict__)))
    for source, place in known.cells:
        with contextlib.suppress(LookupError, ValueError):
            saved.append(("variable", source, place, place.get()))
    return saved


def _kind_of(value: Any) -> str:
    return "settings" if is_library(type(value)) else "attributes"


def restore(saved: list[Kept]) -> None:
    """Put back what is another object now."""
    for kind, _, where, before in saved:
        if kind == "variable":
            if where.get() is not before:
                where.put(before)
        elif not same(where, before):
            where.clear()
            (where.extend if isinstance(where, list | collections.deque) else where.update)(before)


def same(one: Any, other: Any) -> bool:
    """Say whether two containers hold the same objects in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):  # the entries themselves, whatever a class makes of them on access
        pairs = zip(dict.items(one), dict.items(other), strict=True)
        return all(a is b and held is given for (a, held), (b, given) in pairs)
    return isinstance(one, set) or all(a is b for a, b in zip(one, other, strict=True))


def further(source: Source, kind: str, key: Any) -> Source:
    """Name an entry of what was kept."""
    if kind == "buffers":
        return source.to("child", ("_buffers", key))
    return source.to("attribute" if kind in ATTRIBUTES else "item", key)
