"""Arguments that a call gives by PyTorch's names, which replacements may call otherwise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_BY_HAND: dict[Any, tuple[str, ...]] = {  # PyTorch parses these without a schema of theirs
    torch.tensor: ("data",),
    torch.as_tensor: ("data",),
    Tensor.new_tensor: ("input", "data"),
}


def by_position(
    func: Callable[..., Any],
    replacement: Callable[..., Any] | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Give arguments by position where the one that takes them has other names for them.

    ``func``: PyTorch's. ``replacement``: what takes its place, if something does.
    """
    if args and (replacement is None or _takes(replacement, frozenset(kwargs))):
        return args, kwargs
    for positional, others in _names(func):
        if kwargs.keys() <= {*positional, *others}:
            moved, left = list(args), dict(kwargs)
            for name in positional[len(args) :]:
                if name not in left:
                    break
                moved.append(left.pop(name))
            if len(moved) > len(args):
                return moved, left
    return args, kwargs


@functools.cache
def _takes(replacement: Callable[..., Any], names: frozenset[str]) -> bool:
    """Say whether a function has arguments of these names, or takes any."""
    parameters = inspect.signature(replacement).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
    return names <= named or any(p.kind is p.VAR_KEYWORD for p in parameters)


_OF_FACTORIES = {"dtype", "layout", "device", "pin_memory", "requires_grad", "memory_format", "out"}


@functools.cache
def _names(func: Callable[..., Any]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """List the names of arguments, by position and others, for each way in which PyTorch is called.

    Functions of Python tell their own; those of C++ have one of the schemas of their name.
    """
    if func in _BY_HAND:
        return [(_BY_HAND[func], tuple(_OF_FACTORIES))]
    if inspect.isfunction(func):
        parameters = inspect.signature(func).parameters.values()
        positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        return [(positional, tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY))]
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    schemas = [getattr(packet, name)._schema for name in packet.overloads()] if packet else []
    found = []
    for schema in schemas:
        given = [("input" if a.name == "self" else a.name, a.kwarg_only) for a in schema.arguments]
        positional = tuple(name for name, is_named in given if not is_named)
        named = {name for name, is_named in given if is_named}
        found.append((positional, tuple(named | _OF_FACTORIES)))
    return sorted(found, key=lambda each: len(each[0]))
