"""Tensors without axes that hold a number computed from sizes, and go back where a size is wanted.

``torch.tensor(x.shape[1])`` and ``torch.div(x.shape[1], 8, rounding_mode="trunc")`` make a tensor
of a size; as the bound of a slice or as an extent it would be data, which no shape can follow.
While a model is exported such a tensor remembers its number, until somebody writes into it.

``torch.arange(mask.sum(1).max())`` is as long as data tell, and at most as the mask: such a number
is a size that is counted (:mod:`.counted`), of positions below it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.loops.sequences import DynamicList
from relax_disc.frontend.capture.source_lines import calling_line

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
_WITH_VALUES = frozenset((torch.full, Tensor.new_full, Tensor.clamp, torch.clamp))
_ATTRIBUTE = "_relax_disc_size"
_ATEN = torch.ops.aten
_SUMS = (_ATEN.sum.default, _ATEN.sum.dim_IntList)
_CASTS = (_ATEN.to.dtype, _ATEN._to_copy.default)
_GREATEST = (_ATEN.max.default, _ATEN.amax.default, *_CASTS)


def sizes_for_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Put numbers into the arguments of a call in the place of tensors that remember them."""
    if func not in _OF_SIZES and func not in _MADE_BY_SIZES:
        return args, kwargs
    first = 1 if func in _OF_SIZES else 0
    replaced = functools.partial(_replaced, counts=func not in _WITH_VALUES)
    return (*args[:first], *replaced(tuple(args[first:]))), replaced(dict(kwargs))


def _replaced(value: Any, counts: bool) -> Any:
    if isinstance(value, tuple | list | dict) and not isinstance(value, torch.Size):
        again = functools.partial(_replaced, counts=counts)
        return pytree.tree_map(again, value, is_leaf=lambda x: x is not value)
    if not isinstance(value, Tensor):
        return value
    if counts and _remembered(value) is None:
        _count(value)
    number = _remembered(value)
    return value if number is None else number


def _remember(x: Tensor, number: Any) -> None:
    setattr(x, _ATTRIBUTE, (number, x._version))


def _remembered(x: Tensor) -> Any:
    """Return the number of a tensor that nobody has written into since."""
    number, version = getattr(x, _ATTRIBUTE, (None, None))
    return number if version == x._version else None


def _count(x: Tensor) -> None:
    """Let a tensor that says how much a mask holds remember that as a size that is counted.

    That it is no more than can be is asserted: the mask may have been written into.
    """
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    slot = None if tracer is None or not _is_whole(x) else get_proxy_slot(x, tracer, None)
    most = None if slot is None else _most(slot.proxy.node)
    if most is not None:
        places = torch.arange(most, device=x.device)
        torch.ops.aten._assert_async.msg(
            (x >= 0).logical_and(x <= most),
            f"{calling_line()}: a size that data tell is less than 0, or more than its mask holds; "
            "take it from a sum over the mask alone.",
        )
        _remember(x, torch.nonzero(places < x).shape[0])


def _most(node: fx.Node) -> Any:
    """Return the most that a sum over a mask can be; None for other values."""
    source: Any = node.args[0] if node.args else None
    if node.target in _GREATEST:
        return _most(source)
    if node.target not in _SUMS:
        return None
    shape = source.meta["val"].shape
    axes: Any = node.args[1] if len(node.args) > 1 else None
    while source.target in _CASTS:
        source = source.args[0]
    is_mask = source.meta["val"].dtype == torch.bool
    return math.prod(shape[axis] for axis in axes or range(len(shape))) if is_mask else None


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
        _remember(result, number)
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


def made(data: Any, **options: Any) -> Tensor | None:
    """``torch.tensor`` of a list of symbolic length; None for other values."""
    if not isinstance(data, DynamicList):
        return None
    return data.as_numbers(options.get("device")).to(options.get("dtype"))


def made_as(data: Any, dtype: Any = None, device: Any = None) -> Tensor | None:
    """``torch.as_tensor`` of sizes, which makes numbers of them where ``torch.tensor`` does not."""
    options = {"dtype": dtype, "device": device}
    symbols = torch.SymInt | torch.SymFloat | torch.SymBool
    if isinstance(data, Tensor | DynamicList):
        return made(data, **options)
    if not any(isinstance(leaf, symbols) for leaf in pytree.tree_leaves(data)):
        return None
    return remember_size(torch.tensor, (data,), {}, torch._refs.tensor(data, **options))


def made_like(x: Tensor, data: Any, dtype: Any = None, device: Any = None) -> Tensor | None:
    """``x.new_tensor`` of sizes; None for other values."""
    dtype = x.dtype if dtype is None else dtype
    return made_as(data, dtype, x.device if device is None else device)


def item(x: Tensor) -> Any:
    """Return the number that a tensor remembers; torch.export asks for the bounds of slices so."""
    return _remembered(x)


def _number(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _remembered(x)
    return x if isinstance(x, int | torch.SymInt) and not isinstance(x, bool) else None


def _is_whole(x: Tensor) -> bool:
    return x.dim() == 0 and x.dtype == torch.int64


REPLACED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_DIVIDE, divided),
    Tensor.item: item,
    torch.tensor: made,
    torch.as_tensor: made_as,
    Tensor.new_tensor: made_like,
}
