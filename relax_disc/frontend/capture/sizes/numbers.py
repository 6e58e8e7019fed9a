"""Tensors without axes that hold a number computed from sizes, and go back where a size is wanted.

``torch.tensor(x.shape[1])`` and ``torch.div(x.shape[1], 8, rounding_mode="trunc")`` make a tensor
of a size; as the bound of a slice or as an extent it would be data, which no shape can follow.
While a model is exported such a tensor remembers its number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_MAKE = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_DIVIDE = (torch.div, Tensor.div, torch.divide, Tensor.divide)


def _reversed(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: function(y, x)


_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    getattr(home, name): function
    for function, names in (
        (operator.add, ("add", "__add__", "__radd__")),
        (operator.sub, ("sub", "__sub__")),
        (_reversed(operator.sub), ("rsub", "__rsub__")),
        (operator.mul, ("mul", "__mul__", "__rmul__")),
        (operator.floordiv, ("floor_divide", "__floordiv__")),
        (operator.neg, ("neg", "__neg__")),
    )
    for home in (torch, Tensor)
    for name in names
    if hasattr(home, name)
}
_OF_SIZES = frozenset(
    getattr(home, name)
    for home, names in (
        (Tensor, ("view", "reshape", "expand", "repeat", "narrow", "clamp")),
        (Tensor, ("new_zeros", "new_ones", "new_full", "new_empty", "as_strided")),
        (torch, ("reshape", "narrow", "clamp", "as_strided")),
    )
    for name in names
)
_MADE_BY_SIZES = frozenset((torch.arange, torch.zeros, torch.ones, torch.full, torch.empty))
_ATTRIBUTE = "_relax_disc_size"


def sizes_for_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Put numbers into the arguments of a call in the place of tensors that remember them."""
    if func not in _OF_SIZES and func not in _MADE_BY_SIZES:
        return args, kwargs
    first = 1 if func in _OF_SIZES else 0
    return (*args[:first], *_replaced(tuple(args[first:]))), _replaced(dict(kwargs))


def _replaced(value: Any) -> Any:
    if isinstance(value, tuple | list | dict) and not isinstance(value, torch.Size):
        return pytree.tree_map(_replaced, value, is_leaf=lambda x: x is not value)
    return getattr(value, _ATTRIBUTE, value) if isinstance(value, Tensor) else value


def remember_size(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Return what a call returned; it remembers its number if that follows from sizes alone."""
    if func in _MAKE:
        number = args[0] if args and isinstance(args[0], torch.SymInt) else None
    elif func in _ARITHMETIC and not kwargs:
        operands = [_number(x) for x in args]
        known = None not in operands and any(isinstance(x, Tensor) for x in args)
        number = _ARITHMETIC[func](*operands) if known else None
    else:
        return result
    if number is not None and isinstance(result, Tensor) and _is_whole(result):
        setattr(result, _ATTRIBUTE, number)
    return result


def divided(x: Any, y: Any, *, rounding_mode: str | None = None) -> Tensor | None:
    """``torch.div`` of a size by a number, rounded."""
    size = _number(x)
    if not isinstance(size, torch.SymInt) or not isinstance(y, int) or y <= 0:
        return None
    if rounding_mode is None or (rounding_mode == "trunc" and not size >= 0):
        return None
    quotient: Any = size // y
    whole = torch.scalar_tensor(quotient, dtype=torch.int64)
    return remember_size(torch.tensor, (quotient,), {}, whole)


def item(x: Tensor) -> Any:
    """Return the number that a tensor remembers; torch.export asks for the bounds of slices so."""
    return getattr(x, _ATTRIBUTE, None)


def _number(x: Any) -> Any:
    if isinstance(x, Tensor):
        return getattr(x, _ATTRIBUTE, None)
    return x if isinstance(x, int | torch.SymInt) and not isinstance(x, bool) else None


def _is_whole(x: Tensor) -> bool:
    return x.dim() == 0 and x.dtype == torch.int64


REPLACED: dict[Any, Callable[..., Any]] = {**dict.fromkeys(_DIVIDE, divided), Tensor.item: item}
