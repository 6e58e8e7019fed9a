"""Lists of what lies along an axis that is as long as a dim, and ranges of such a length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor

from relax_disc.frontend.capture.loops.recorded import OtherLoops, active
from relax_disc.frontend.capture.loops.sequences import (
    DynamicList,
    DynamicRange,
    Rows,
    fixed,
    is_same,
    least,
)
from relax_disc.frontend.capture.sizes.dims import least_size


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
    if _unified(one, one.node.expr, loops.dims) != _unified(other, other.node.expr, loops.dims):
        return False
    torch._check(one == other)
    return True


def window(start: torch.SymInt, stop: torch.SymInt, extent: Any) -> int | None:
    """Return how long a slice is, if it is one length and inside an axis in each step of a loop."""
    loops = active()
    if loops is None or loops.inside is None:
        return None
    number: Any = loops.step.node.expr
    first, end, size = (
        sympy.sympify(n.node.expr) if isinstance(n, torch.SymInt) else sympy.Integer(n)
        for n in (start, stop, extent)
    )
    width, factor = sympy.expand(end - first), sympy.expand(first).coeff(number, 1)
    last = sympy.expand(end.xreplace({number: loops.count.node.expr - 1}))
    low = sympy.expand(first.xreplace({number: sympy.S.Zero}))
    if not (width.is_Integer and width >= 1 and factor.is_Integer and factor >= 0):
        return None
    env: Any = loops.step.node.shape_env
    rooms = low, sympy.expand(_unified(loops.step, size - last, loops.dims))
    return int(width) if all(env.bound_sympy(room).lower >= 0 for room in rooms) else None


def _unified(size: torch.SymInt, expression: Any, dims: Mapping[str, Any]) -> Any:
    """Write an expression with one symbol for each declared dim; ``size``: any of its trace."""
    env: Any = size.node.shape_env
    firsts: dict[str, Any] = {}
    names: dict[Any, Any] = {}
    for symbol, sources in env.var_to_sources.items():
        for source in sources:
            if source.name in dims:
                names[symbol] = firsts.setdefault(dims[source.name].__name__, symbol)
    return expression.xreplace(names)


def fewest(count: torch.SymInt, dims: Mapping[str, Any]) -> int:
    """Return the steps at the least sizes of the dims; PyTorch notes 2 for a declared 1."""
    env: Any = count.node.shape_env
    expression: Any = count.node.expr
    sizes = {}
    for symbol in expression.free_symbols:
        sources = (source.name for source in env.var_to_sources.get(symbol, ()))
        low = int(env.var_to_range[symbol].lower)
        declared = [least_size(dims[name]) for name in sources if name in dims]
        sizes[symbol] = low if low > 2 else max(declared, default=1)
    return int(expression.xreplace(sizes))
