"""What a compiled function reads besides its arguments: inputs, and values that it relies on."""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from relax_disc.frontend.capture.state.sources import Place, Source, is_replaced


@dataclass(frozen=True, slots=True)
class OuterTensor:
    """A tensor, or a number in a tensor of its own, that is an input of the program."""

    tensor: Tensor  # the user's own; for a number a tensor of no axes, float64
    # how the model or the loss function reaches it; None: no path is known, or the code itself
    # holds it
    source: Source | None
    place: Place | None  # where that is
    is_number: bool = False  # what lies there is a Python number


ABSENT = object()
"""Value of a guard of what was not there."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A Python value that the trace read, or a part of it."""

    what: str  # what messages call it
    source: Source | None  # the path to it
    place: Place  # where it lies
    value: Any  # as it was; a list, dict or set is copied
    # for an attribute of a class the instance's own, which must not get one of that name
    shadow: dict[str, Any] | None = None
    # what `value` is of the container, number or tensor at the place: "number" if that may be any
    # other; "form": shape and type, None if it may be any tensor; "same": the path to the same
    # thing, and the place at the end of that
    part: Literal["", "length", "keys", "number", "type", "form", "same"] = ""
    names: frozenset[str] = frozenset()  # the keys that count; empty: all


def code_facts(code: types.CodeType) -> tuple[Any, ...]:
    """Return what a piece of code does, wherever it stands in its file, as plain values."""
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, code.co_flags, *names, *map(_constant, code.co_consts)


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return code_facts(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


@dataclass(frozen=True, slots=True)
class Layouts:
    """How the tensors of the example batch lie in memory, which the user's code asked."""

    where: str  # the line that asked
    # by the index of the leaf of the flattened batch; None for a contiguous one
    strides: Mapping[int, tuple[int, ...] | None]


def strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor, None for a contiguous one."""
    return None if tensor.is_contiguous() else tensor.stride()


@dataclass(frozen=True, slots=True)
class Outer:
    """What a compiled function reads besides the model, the optimizer and the batch.

    ``inputs``: by the targets of the inputs of kinds ``"constant"`` and ``"number"``. ``guards``:
    values that the program relies on. ``layouts``: those of the batch, if it relies on them.
    ``assigned``: the targets of inputs, buffers among them, in whose places the user's code puts
    other tensors; ``written``: those that it writes in place before.
    """

    inputs: Mapping[str, OuterTensor] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    layouts: Layouts | None = None
    assigned: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()

    def released(self) -> Outer:
        """Return the same without the user's tensors, for which empty ones of their form stand.

        Those that no path leads to stay.
        """
        inputs = {
            name: replace(found, tensor=_empty(found.tensor)) if found.place is not None else found
            for name, found in self.inputs.items()
        }
        guards = [replace(g, value=_empty(g.value)) if not g.part else g for g in self.guards]
        return replace(self, inputs=inputs, guards=tuple(guards))


def _empty(value: Any) -> Any:
    """Put empty tensors in the places of those in a value, a list, tuple or dict of them."""
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta", requires_grad=False)
    if not is_replaced(value):
        return value
    held = value.values() if isinstance(value, dict) else value
    parts: list[Any] = [*map(_empty, held)]
    if all(map(operator.is_, parts, held)):
        return value
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update(zip(value, parts, strict=True))
        return made
    return type(value)(parts) if type(value) in (list, tuple) else type(value)._make(parts)
