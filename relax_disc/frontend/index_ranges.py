"""Which values the integer tensors of a traced graph can have, and where they stem from.

An interval follows from the operators alone: ``arange`` ends below its length, ``argmax`` below the
axis.  Where a tensor is a batch tensor seen through views and monotone arithmetic with constants,
the way back is kept: bounds on the result become bounds on the batch, to be checked before anything
runs.  Floating-point tensors have no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from relax_disc.analysis.symbolic.comparison.compare import at_most
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.errors import GraphError
from relax_disc.frontend.symbols import SymbolTranslator

Size = SymbolicExpr
_ZERO, _ONE = SymbolicExpr.constant(0), SymbolicExpr.constant(1)


@dataclass(frozen=True, slots=True)
class Origin:
    """A batch tensor, the views of it that are taken, and what is done to its elements."""

    leaf: int  # index among the leaves of the flattened batch
    # ``(name, *numbers)`` of `training.call.batch.VIEWS`, from the batch on
    views: tuple[tuple[Any, ...], ...] = ()
    # ``"add"``, ``"multiply"``, ``"divide"`` (floor), ``"at_least"``
    steps: tuple[tuple[str, Size], ...] = ()
    ignored: int | None = None  # this value of the batch is replaced, by ``instead``
    instead: Size | None = None  # what stands in its place
    is_expanded: bool = False  # whether elements are repeated: axes are no longer those of `views`


@dataclass(frozen=True, slots=True)
class Interval:
    """Values ``lower .. upper``, inclusive; None is no limit.

    ``is_reached``: both ends occur, whatever the data, so that a bound on them is one on the sizes.
    """

    lower: Size | None = None
    upper: Size | None = None
    is_reached: bool = False
    origin: Origin | None = None


_ANY = Interval()
_TRUTH = Interval(_ZERO, _ONE)
_WIDTHS = (torch.uint8, torch.int8, torch.int16, torch.int32)
_LIMITS = {kind: (torch.iinfo(kind).min, torch.iinfo(kind).max) for kind in _WIDTHS}
_LIMITS[torch.bool] = 0, 1


def _name(node: Any) -> str:
    """Name an operator without its namespace and overload."""
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]


Rule = Callable[["IndexRanges", fx.Node], Interval]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


class IndexRanges:
    """Intervals of the integer tensors of one graph."""

    def __init__(self, symbols: SymbolTranslator, leaves: Mapping[fx.Node, int]) -> None:
        self._symbols, self._leaves = symbols, leaves
        self._known: dict[fx.Node, Interval] = {}
        self._dims: dict[str, SymbolicDim] = {}

    def of(self, value: Any) -> Interval:
        """Return the interval of a node, or of a number."""
        if not isinstance(value, fx.Node):
            size = self.size(value)
            return _ANY if size is None else Interval(size, size, True)
        waiting = [value]
        while waiting:
            node = waiting[-1]
            missing = [n for n in node.all_input_nodes if n not in self._known]
            if node in self._known or not missing:
                waiting.pop()
                if node not in self._known:
                    self._known[node] = self._derive(node)
            else:
                waiting += missing
        return self._known[value]

    def size(self, value: Any) -> Size | None:
        """Write an integer, or a number that follows from the dims, over them."""
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, bool | int):
            return SymbolicExpr.constant(int(value))
        if not isinstance(value, torch.SymInt):
            return None
        if not self._dims:
            self._dims = {d.name: SymbolicDim(d.name, d.lower, d.upper) for d in self._symbols.dims}
        try:
            text = self._symbols.text(value)
            return SymbolicExpr.parse(str(text), self._dims)
        except GraphError:
            return None

    def _derive(self, node: fx.Node) -> Interval:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            if isinstance(value, torch.SymInt | int):
                size = self.size(value)
                return _ANY if size is None else Interval(size, size, True)
            return self._apply(node)
        if value.is_floating_point() or value.is_complex():
            return _ANY
        limits = _LIMITS.get(value.dtype)
        low, high = (None, None) if limits is None else map(SymbolicExpr.constant, limits)
        if node.op == "placeholder":
            origin = None
            if node in self._leaves:
                origin = Origin(self._leaves[node])
            return Interval(low, high, origin=origin)
        found = self._apply(node)
        if limits is not None:
            # Arithmetic in a narrow type wraps around.
            inside = at_most(low, found.lower) and at_most(found.upper, high)
            return found if inside else Interval(low, high)
        return found

    def _apply(self, node: fx.Node) -> Interval:
        rule = RULES.get(_name(node))
        if node.op != "call_function" or rule is None:
            return _ANY
        return rule(self, node)


def required(
    ranges: IndexRanges, origin: Origin, lower: Size, upper: Size
) -> tuple[Size | None, Size | None] | None:
    """Find the values of the batch for which what is computed of them is inside a range.

    None of a pair is no limit; None: no interval says it.
    """
    low: Size | None = lower
    high: Size | None = upper
    for kind, number in reversed(origin.steps):
        if kind == "add":
            low, high = (None if x is None else x - number for x in (low, high))
        elif kind == "multiply" and number == -_ONE:
            low, high = (None if x is None else -x for x in (high, low))
        elif kind == "multiply":
            low = None if low is None else -(-low // number)
            high = None if high is None else high // number
        elif kind == "divide":
            low = None if low is None else low * number
            high = None if high is None else high * number + number - 1
        else:  # at least
            if high is not None and not at_most(number, high):
                return None
            if low is not None:
                if not (at_most(low, number) or at_most(number, low)):
                    return None
                low = None if at_most(low, number) else low
    return low, high


def _union(a: Size | None, b: Size | None, largest: bool) -> Size | None:
    if a is None or b is None:
        return None
    if a == b:
        return a
    return a.maximum(b) if largest else a.minimum(b)


def _hull(intervals: Sequence[Interval]) -> Interval:
    whole = intervals[0]
    for other in intervals[1:]:
        whole = Interval(
            _union(whole.lower, other.lower, False), _union(whole.upper, other.upper, True)
        )
    return replace(whole, is_reached=False, origin=None)


def _stepped(x: Interval, kind: str, number: Size) -> Origin | None:
    origin = x.origin
    if origin is None or origin.ignored is not None:
        return None
    return replace(origin, steps=(*origin.steps, (kind, number)))


def _viewed(x: Interval, *view: Any) -> Interval:
    """Take elements of a view; of some a part only."""
    keeps_all = view[0] in ("reshape", "permute")
    origin = x.origin
    if origin is not None:
        if None in view[1:] or (origin.is_expanded and not keeps_all):
            origin = None
        elif not origin.is_expanded:
            origin = replace(origin, views=(*origin.views, view))
    return replace(x, origin=origin, is_reached=x.is_reached and keeps_all)


def _reshaped(ranges: IndexRanges, x: Interval, value: torch.Tensor) -> Interval:
    return _viewed(x, "reshape", *(ranges.size(n) for n in value.shape))


def _first(node: fx.Node) -> Any:
    return node.args[0]


@_rule("alias", "clone", "detach", "contiguous", "lift_fresh_copy", "copy", "_to_copy")
def _same(ranges: IndexRanges, node: fx.Node) -> Interval:
    source: Any = node.args[1] if str(node.target) == "aten.copy.default" else _first(node)
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    fits = before in (after, torch.bool) or before.itemsize < after.itemsize
    return ranges.of(source) if fits and not before.is_floating_point else _ANY


@_rule("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze")
def _reshape(ranges: IndexRanges, node: fx.Node) -> Interval:
    return _reshaped(ranges, ranges.of(_first(node)), node.meta["val"])


@_rule("expand", "repeat", "flip", "roll")
def _expand(ranges: IndexRanges, node: fx.Node) -> Interval:
    x = ranges.of(_first(node))
    return x if x.origin is None else replace(x, origin=replace(x.origin, is_expanded=True))


@_rule("permute", "transpose", "t")
def _permute(ranges: IndexRanges, node: fx.Node) -> Interval:
    rank = len(node.meta["val"].shape)
    order = list(range(rank))
    if "permute" in str(node.target):
        axes: Any = node.args[1]
        order = [axis % rank for axis in axes]
    elif rank > 1:
        swapped: Any = node.args[1:] or (0, 1)
        a, b = (int(axis) % rank for axis in swapped)
        order[a], order[b] = b, a
    return _viewed(ranges.of(_first(node)), "permute", *map(SymbolicExpr.constant, order))


@_rule("select")
def _select(ranges: IndexRanges, node: fx.Node) -> Interval:
    return _viewed(ranges.of(_first(node)), "select", *(ranges.size(n) for n in node.args[1:3]))


@_rule("slice")
def _slice(ranges: IndexRanges, node: fx.Node) -> Interval:
    _, axis, start, end, step = [*node.args, *(0, 0, None, None, 1)[len(node.args) :]]
    numbers = [0 if start is None else start, 2**62 if end is None else end, step]
    numbers = [2**62 if n == 2**63 - 1 else n for n in numbers]
    return _viewed(ranges.of(_first(node)), "slice", *(ranges.size(n) for n in (axis, *numbers)))


@_rule("getitem")
def _getitem(ranges: IndexRanges, node: fx.Node) -> Interval:
    call: Any = _first(node)
    name = _name(call)
    place: Any = node.args[1]
    source: Any = call.args[0]
    if name in ("topk", "sort", "max", "min", "kthvalue", "mode", "median") and place == 1:
        at = {"topk": 2, "kthvalue": 2}.get(name, 1)
        axis = call.args[at] if len(call.args) > at else call.kwargs.get("dim", -1)
        return _positions(ranges, source, axis)
    if name == "unbind":
        axis = call.args[1] if len(call.args) > 1 else 0
        return _viewed(ranges.of(source), "select", *map(ranges.size, (axis, place)))
    if name in ("split_with_sizes", "split") and isinstance(call.args[1], list | tuple):
        axis = call.args[2] if len(call.args) > 2 else 0
        sizes = [ranges.size(n) for n in call.args[1]]
        start: Any = _ZERO
        for size in sizes[:place]:
            start = None if start is None or size is None else start + size
        size = sizes[place]
        end = None if start is None or size is None else start + size
        numbers = (ranges.size(axis), start, end, _ONE)
        return _viewed(ranges.of(source), "slice", *numbers)
    return ranges.of(source) if name in ("sort", "topk", "max", "min") else _ANY


def _positions(ranges: IndexRanges, x: fx.Node, axis: Any) -> Interval:
    """Positions along an axis; of all elements where there is none."""
    shape = x.meta["val"].shape
    if not shape:
        return Interval(_ZERO, _ZERO)
    size = _ONE
    for n in shape if axis is None else [shape[axis]]:
        extent = ranges.size(n)
        if extent is None:
            return Interval(_ZERO)
        size = size * extent
    return Interval(_ZERO, size - 1)


@_rule("argmax", "argmin")
def _extreme_position(ranges: IndexRanges, node: fx.Node) -> Interval:
    x: Any = _first(node)
    return _positions(ranges, x, node.args[1] if len(node.args) > 1 else None)


@_rule("arange")
def _arange(ranges: IndexRanges, node: fx.Node) -> Interval:
    numbers = [ranges.size(n) for n in node.args[:3]]
    if "start" not in str(node.target):
        numbers = [_ZERO, *numbers]
    start, end, step = [*numbers, _ONE][:3]
    if start is None or end is None or step != _ONE:
        return _ANY
    return Interval(start, end - 1, True)


@_rule("full", "full_like", "scalar_tensor", "new_full")
def _full(ranges: IndexRanges, node: fx.Node) -> Interval:
    place = {"scalar_tensor": 0, "new_full": 2}.get(_name(node), 1)
    return ranges.of(node.args[place])


@_rule("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones")
def _filled(ranges: IndexRanges, node: fx.Node) -> Interval:
    return ranges.of(int("ones" in _name(node)))


@_rule(
    *("eq", "ne", "lt", "le", "gt", "ge", "any", "all", "isnan", "isinf", "isfinite"),
    *("logical_and", "logical_or", "logical_not", "logical_xor"),
)
def _truth(ranges: IndexRanges, node: fx.Node) -> Interval:
    return _TRUTH


def _constant(x: Interval) -> Size | None:
    return x.lower if x.is_reached and x.lower is not None and x.lower == x.upper else None


@_rule("add", "sub", "rsub")
def _add(ranges: IndexRanges, node: fx.Node) -> Interval:
    a, b = (ranges.of(x) for x in node.args[:2])
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    name = _name(node)
    if alpha != 1:
        b = _times(b, ranges.size(alpha))
    if name == "rsub":
        a, b = b, a
    if name != "add":
        b = _times(b, -_ONE)
    return _sum(a, b)


def _sum(a: Interval, b: Interval) -> Interval:
    lower = None if a.lower is None or b.lower is None else a.lower + b.lower
    upper = None if a.upper is None or b.upper is None else a.upper + b.upper
    for x, other in ((a, b), (b, a)):
        number = _constant(other)
        if number is not None:
            return Interval(lower, upper, x.is_reached, _stepped(x, "add", number))
    return Interval(lower, upper)


def _times(x: Interval, number: Size | None) -> Interval:
    if number is None or not number.is_constant:
        return _ANY
    if number.as_int() == 0:
        return Interval(_ZERO, _ZERO)
    low, high = (x.lower, x.upper) if number.as_int() > 0 else (x.upper, x.lower)
    low, high = (None if end is None else end * number for end in (low, high))
    origin = _stepped(x, "multiply", number) if number.as_int() >= -1 else None
    return Interval(low, high, x.is_reached, origin)


@_rule("neg")
def _neg(ranges: IndexRanges, node: fx.Node) -> Interval:
    return _times(ranges.of(_first(node)), -_ONE)


@_rule("mul")
def _mul(ranges: IndexRanges, node: fx.Node) -> Interval:
    a, b = (ranges.of(x) for x in node.args[:2])
    for x, other in ((a, b), (b, a)):
        number = _constant(other)
        if number is not None and number.is_constant:
            return _times(x, number)
    if a.lower is None or a.upper is None or b.lower is None or b.upper is None:
        return _ANY
    if not (at_most(_ZERO, a.lower) and at_most(_ZERO, b.lower)):
        return _ANY
    return Interval(a.lower * b.lower, a.upper * b.upper)


def _divisor(ranges: IndexRanges, node: fx.Node) -> Size | None:
    number = _constant(ranges.of(node.args[1]))
    if number is None or not number.is_constant or number.as_int() <= 0:
        return None
    return number


@_rule("div", "floor_divide")
def _divide(ranges: IndexRanges, node: fx.Node) -> Interval:
    x, number = ranges.of(_first(node)), _divisor(ranges, node)
    mode = node.kwargs.get("rounding_mode", "floor" if "floor" in str(node.target) else None)
    if number is None or mode is None:
        return _ANY
    if mode != "floor" and not at_most(_ZERO, x.lower):
        return _ANY
    low, high = (None if end is None else end // number for end in (x.lower, x.upper))
    return Interval(low, high, x.is_reached, _stepped(x, "divide", number))


@_rule("remainder", "fmod")
def _remainder(ranges: IndexRanges, node: fx.Node) -> Interval:
    number = ranges.of(node.args[1])
    if "fmod" in str(node.target) and not at_most(_ZERO, ranges.of(_first(node)).lower):
        return _ANY
    if number.lower is None or number.upper is None or not at_most(_ONE, number.lower):
        return _ANY
    return Interval(_ZERO, number.upper - 1)


@_rule("bitwise_and")
def _bitwise_and(ranges: IndexRanges, node: fx.Node) -> Interval:
    for x in node.args[:2]:
        number = _constant(ranges.of(x))
        if number is not None and at_most(_ZERO, number):
            return Interval(_ZERO, number)
    return _ANY


def _raised(ranges: IndexRanges, x: Interval, least: Interval) -> Interval:
    """Of two values the greater."""
    lower = least.lower if x.lower is None else x.lower
    if x.lower is not None and least.lower is not None:
        lower = _union(x.lower, least.lower, True)
    upper = _union(x.upper, least.upper, True)
    number = _constant(least)
    origin = None if number is None else _stepped(x, "at_least", number)
    return Interval(lower, upper, False, origin)


def _lowered(ranges: IndexRanges, x: Interval, most: Interval) -> Interval:
    """Of two values the lesser."""
    return _times(_raised(ranges, _times(x, -_ONE), _times(most, -_ONE)), -_ONE)


@_rule("maximum", "clamp_min")
def _maximum(ranges: IndexRanges, node: fx.Node) -> Interval:
    a, b = (ranges.of(x) for x in node.args[:2])
    return _raised(ranges, b, a) if _constant(a) is not None else _raised(ranges, a, b)


@_rule("minimum", "clamp_max")
def _minimum(ranges: IndexRanges, node: fx.Node) -> Interval:
    a, b = (ranges.of(x) for x in node.args[:2])
    return _lowered(ranges, b, a) if _constant(a) is not None else _lowered(ranges, a, b)


@_rule("clamp")
def _clamp(ranges: IndexRanges, node: fx.Node) -> Interval:
    _, low, high = [*node.args, None, None][:3]
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    x = ranges.of(_first(node))
    if low is not None:
        x = _raised(ranges, x, ranges.of(low))
    return x if high is None else _lowered(ranges, x, ranges.of(high))


@_rule("where")
def _where(ranges: IndexRanges, node: fx.Node) -> Interval:
    """A choice; ``where(x != c, x, other)`` of a batch tensor remembers that ``c`` is replaced."""
    condition: Any = node.args[0]
    x, other = (ranges.of(branch) for branch in node.args[1:3])
    whole = _hull([x, other])
    name = str(condition.target) if isinstance(condition, fx.Node) else ""
    if "aten.eq.Scalar" in name:
        x, other = other, x
    elif "aten.ne.Scalar" not in name:
        return whole
    compared, number = ranges.of(condition.args[0]).origin, condition.args[1]
    origin, instead = x.origin, _constant(other)
    fits = (
        origin is not None
        and compared is not None
        and _parts(origin) == _parts(compared)
        and not origin.steps
        and not compared.steps
        and isinstance(number, int)
    )
    if not fits or origin is None or instead is None:
        return whole
    return replace(whole, origin=replace(origin, ignored=number, instead=instead))


def _parts(origin: Origin) -> tuple[Any, ...]:
    """What part of the batch tensor is taken, however it is arranged."""
    kept = tuple(view for view in origin.views if view[0] in ("select", "slice"))
    return (origin.leaf, kept)


@_rule("cat", "stack")
def _cat(ranges: IndexRanges, node: fx.Node) -> Interval:
    parts: Any = _first(node)
    return _hull([ranges.of(part) for part in parts])


@_rule("constant_pad_nd")
def _pad(ranges: IndexRanges, node: fx.Node) -> Interval:
    value = node.args[2] if len(node.args) > 2 else 0
    return _hull([ranges.of(_first(node)), ranges.of(value)])


@_rule("gather", "index", "index_select", "embedding", "tril", "triu", "masked_fill")
def _taken(ranges: IndexRanges, node: fx.Node) -> Interval:
    x = replace(ranges.of(_first(node)), is_reached=False, origin=None)
    name = _name(node)
    if name == "masked_fill":
        return _hull([x, ranges.of(node.args[2])])
    return _hull([x, ranges.of(0)]) if name.startswith("tri") else x


@_rule("abs")
def _abs(ranges: IndexRanges, node: fx.Node) -> Interval:
    x = ranges.of(_first(node))
    if x.lower is None or x.upper is None:
        return Interval(_ZERO)
    return Interval(_ZERO, x.upper.maximum(-x.lower))


@_rule("cumsum")
def _cumsum(ranges: IndexRanges, node: fx.Node) -> Interval:
    x, source = ranges.of(_first(node)), node.meta["val"]
    axis: Any = node.args[1]
    count = ranges.size(source.shape[axis]) if source.shape else _ONE
    if not at_most(_ZERO, x.lower) or x.upper is None or count is None:
        return _ANY
    return Interval(x.lower, x.upper * count)


@_rule("searchsorted", "bucketize")
def _searchsorted(ranges: IndexRanges, node: fx.Node) -> Interval:
    borders: Any = node.args[1] if "bucketize" in str(node.target) else node.args[0]
    count = ranges.size(borders.meta["val"].shape[-1])
    return Interval(_ZERO, count)
