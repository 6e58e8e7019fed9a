"""What a trace has read of what a model and a loss function can reach."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from relax_disc.frontend.capture.state.kinds import CONTAINERS
from relax_disc.frontend.capture.state.reachable import Reachable
from relax_disc.frontend.capture.state.sources import Source

TABLES = ("_parameters", "_buffers", "_modules")
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


@dataclass(frozen=True, slots=True)
class Trace:
    """What one trace has read and changed of what was `known`."""

    known: Reachable
    reads: Mapping[tuple[int, str], tuple[Any, Any]]  # attributes, by the id of who holds them
    absent: Mapping[tuple[int, str], Any]  # who was asked for an attribute that it does not have
    tables: Mapping[tuple[int, str], nn.Module]  # of whose `TABLES` one was gone through
    frozen_flags: Mapping[int, Tensor]  # of which ``requires_grad`` was read
    attributes: Mapping[tuple[int, str], Tensor]  # asked of parameters and buffers, by their ids
    whole: Collection[int]  # objects whose ``__dict__`` was read
    tensors: Mapping[int, tuple[Source, Tensor]]  # that the trace was given, by their ids
    asked: Collection[int]  # of which no more than shape and type was asked
    changed: Collection[tuple[int, Any]]  # places, and containers with None
    live: Collection[int]  # numbers of ``known.plain`` that are inputs
    pinned: Collection[int]  # those of them that are fixed none the less
    kinds: Collection[int]  # those of them whose types are


def may_read(known: Reachable, source: Source, holder: Any) -> bool:
    """Say whether the functions may read a value that is no attribute of a module."""
    kind, key = source.steps[-1]
    if kind == "attribute" and is_recorded(holder):
        return False
    if source.steps[-2:-1] == (("member", "keywords"),):  # of a partial function
        return True
    if kind == "item" and isinstance(holder, dict):
        by_name = any(other in known.names for other in holder)
        return not isinstance(key, str) or known.may_name(key) or not by_name
    return kind not in ("attribute", "slot") or known.may_name(key)


def is_recorded(holder: Any) -> bool:
    """Say whether reads of an object's attributes can be noted."""
    if isinstance(holder, type | types.ModuleType | Tensor) or type(holder) in CONTAINERS:
        return False
    return not type(holder).__flags__ & _IMMUTABLE


def holders_of(trace: Trace) -> dict[Source, Any]:
    """Return what holds others, by the paths to it."""
    return dict(trace.known.containers) | dict(trace.known.modules.values())


def read_ids_of(trace: Trace) -> set[int]:
    """Return the ``id`` of each attribute that was read."""
    return {id(value) for _, value in trace.reads.values()}


def is_read(
    trace: Trace,
    source: Source,
    value: Any,
    holders: Mapping[Source, Any],
    read_ids: Collection[int],
) -> bool:
    """Say whether the functions may read a container, by any of the ways to it."""
    ways, known = [(source, value)], set[int]()
    for path, held in ways:  # grows
        if id(held) not in known:
            known.add(id(held))
            ways += [(other, held) for other in trace.known.again.get(id(held), ())]
        if not path.steps:
            return True
        kind, key = path.steps[-1]
        parent = Source(path.root, path.steps[:-1])
        holder = holders.get(parent)
        if kind in ("closure", "global"):
            return True
        if kind in ("attribute", "slot"):
            if holder is None or not is_recorded(holder):
                read = trace.known.may_name(key)
            else:
                read = id(held) in read_ids or id(holder) in trace.whole
            if read:
                return True
        elif holder is None:
            return True
        elif may_read(trace.known, path, holder):
            ways.append((parent, holder))
    return False
