"""Lists of what lies along an axis that is as long as a dim, and ranges of such a length."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor

from relax_disc.frontend.capture.loops.bounds import (
    ask_for_longer,
    check_last_step,
    factor_of_step,
    never_negative,
    unified,
)
from relax_disc.frontend.capture.loops.recorded import OtherLoops, active
from relax_disc.frontend.capture.loops.sequences import (
    DynamicList,
    DynamicRange,
    Rows,
    fixed,
    is_same,
    least,
)


def rows_of(x: Tensor, axis: int, size: int | None = None) -> DynamicList | None:
    """Make a list of what lies along an axis, ``size`` positions each; None where it is no dim.

    ``size``: None leaves the axis out.
    """
    loops = active()
    if x.dim() == 0 or loops is None:
        return None
    axis %= x.dim()
    extent = x.shape[axis]
    if not isinstance(extent, torch.SymInt) or fixed(extent) is not None:
        return None
    if not loops.are_all:
        raise OtherLoops("a loop over a tensor")
    if size is None:
        return DynamicList([(extent, Rows(x, axis))])
    count = extent // size
    return DynamicList([(count, Rows(x.unflatten(axis, (count, size)), axis))])


def pieces_of(x: Tensor, axis: int, size: Any) -> DynamicList | None:
    """Cut a tensor into pieces of ``size`` positions, of which the last may be shorter.

    None where the axis is no dim.
    """
    loops = active()
    axis %= x.dim()
    extent: Any = x.shape[axis]
    if loops is None or not isinstance(extent, torch.SymInt) or fixed(extent) is not None:
        return None
    if not loops.are_all:
        raise OtherLoops("a loop over pieces of a tensor")
    whole = (extent - 1) // size  # pieces, before the last one
    ask_for_longer(whole, extent - whole * size)
    rows = x.narrow(axis, 0, whole * size).unflatten(axis, (whole, size))
    last = x.narrow(axis, whole * size, extent - whole * size)
    return DynamicList([(whole, Rows(rows, axis)), (1, lambda _: last)])


def sequence_of(values: Any) -> DynamicList | None:
    """Return a list or a tensor as a list of one run, if it is as long as a dim."""
    if isinstance(values, Tensor):
        values = rows_of(values, 0)
    if not isinstance(values, DynamicList) or fixed(values.length()) is not None:
        return None
    return values if active() is None else values.in_one_run() or values


def dynamic_range(*arguments: Any) -> Any:
    """``range``, or a :class:`DynamicRange` where sizes tell its length."""
    symbolic = any(isinstance(argument, torch.SymInt) for argument in arguments)
    if len(arguments) == 3 and isinstance(arguments[2], torch.SymInt):
        start, stop, step = arguments
        if is_same(stop - start, step) and least(step) >= 1:
            return [start]  # one piece, as long as the whole
    fixed_step = len(arguments) < 3 or type(arguments[2]) is int
    if symbolic and fixed_step and active() is not None:
        made = DynamicRange(*arguments)
        count = fixed(made.length())
        return made if count is None else [made.at(place) for place in range(count)]
    return range(*arguments)


def same_length(one: Any, other: Any) -> bool:
    """Whether two sizes are equal, by what they are made of or by their declared dims.

    Two tensors that are declared with one dim have a symbol each until the export ends.
    """
    if is_same(one, other):
        return True
    loops = active()
    if loops is None or not all(isinstance(size, torch.SymInt) for size in (one, other)):
        return False
    if unified(one.node.expr, one.node.shape_env, loops) != (
        unified(other.node.expr, other.node.shape_env, loops)
    ):
        return False
    torch._check(one == other)
    return True


def window(x: Tensor, axis: int, start: torch.SymInt, stop: torch.SymInt) -> Tensor | None:
    """Read a slice that is of one length and inside an axis in each step of a loop, or None.

    Raises `LastStepDiffers`: it is so in all but the last step.
    """
    loops = active()
    if loops is None or loops.inside is None:
        return None
    length = sympy.expand((stop - start).node.expr)
    factor = factor_of_step(start, loops)
    if not (length.is_Integer and length >= 1 and factor.is_Integer and factor >= 0):
        return None
    width, apart, left = int(length), int(factor), x.shape[axis] - stop
    if not never_negative(start):
        return None
    if not never_negative(left):
        check_last_step(left, "reads less")
        return None
    if width == 1:
        return x.select(axis, start).unsqueeze(axis)
    if width == apart:  # pieces behind each other, of which there may be none
        whole = x.narrow(axis, start - apart * loops.step, loops.count * width)
        return whole.unflatten(axis, (loops.count, width)).select(axis, loops.step)
    return x.unfold(axis, width, 1).select(axis, start).movedim(-1, axis)
