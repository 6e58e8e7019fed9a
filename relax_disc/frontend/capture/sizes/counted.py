"""Sizes that only the data tell: how many elements a mask selects, how many values are distinct.

Each becomes a dim that is *counted*: a kernel finds its size in the middle of the step, and it has
an upper bound that follows from the dims of the batch, the number of elements that were looked at.
Whatever picks by a mask is written as the positions of the mask's true elements, of which there is
one tensor for each mask, and reads at positions, whose gradients PyTorch knows.

Limits: other operators with such sizes, and models that rely on more than the bound, are refused.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor, _refs, fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils import _pytree as pytree

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.loops.regions import inline_regions
from relax_disc.frontend.capture.sizes.count_checks import conditions_on, is_checkable
from relax_disc.frontend.capture.source_lines import source_line

_ATEN = torch.ops.aten

_COUNTING = {
    _ATEN.index.Tensor,
    _ATEN.masked_select.default,
    _ATEN.nonzero.default,
    _ATEN.nonzero_numpy.default,
    _ATEN.where.default,
    _ATEN._unique2.default,
}
"""Operators of an exported graph whose results may have a size of their own."""

_NAMES = {_ATEN.nonzero.default: "selected", _ATEN._unique2.default: "distinct"}
"""Operators of a traced graph that count, and what their dims are called."""

_NEEDS_ONE = ("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median", "mode")
"""Operators that PyTorch refuses over no elements at all."""

_ADVICE = (
    "Instead of picking by data, weigh by them: ignore_index of a loss, torch.where, or "
    "(loss * mask).sum() / mask.sum()."
)


@dataclass(frozen=True, slots=True)
class CountedSize:
    """A size of a traced graph that an operator counts."""

    node: fx.Node  # the first operator that does
    symbols: frozenset[sympy.Symbol]  # what it is called; several masks may select as much
    name: str  # of its dim
    bound: Any  # the most it can be: a `torch.SymInt` or an integer
    least: int  # 1 where it must not be 0
    conditions: tuple[Any, ...] = ()  # what else it must fulfil: relations of sympy's


def refuse_other_sizes(program: ExportedProgram) -> None:
    """Refuse operators whose result's size depends on data in a way that has no bound here.

    Raises `UnsupportedOperatorError`: names them and their lines.
    """
    graph = program.graph
    regions = [node.args[0] for node in graph.nodes if _is_made_in_a_region(node)]
    if regions and inline_regions(program.graph_module, dict.fromkeys(regions)):
        program.graph_module.recompile()
    found = [
        (str(node.target), str(source_line(node)))
        for node in graph.nodes
        if node.meta.get("unbacked_bindings") and node.target not in _COUNTING
    ]
    if found:
        raise _refusal(found)


def _is_made_in_a_region(node: fx.Node) -> bool:
    """Whether a region, such as one without gradients, has counted a result's size."""
    return node.target is operator.getitem and bool(node.meta.get("unbacked_bindings"))


@contextlib.contextmanager
def general_ways() -> Iterator[None]:
    """Let PyTorch's own questions whether a counted size equals another go unanswered: "no".

    It asks for layouts and broadcasts; the way of unequal sizes is right for equal ones too.
    """
    before = ShapeEnv.evaluate_sym_node

    def answered(self: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return before(self, node, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if isinstance(node.expr, sympy.Eq | sympy.Ne):
                return isinstance(node.expr, sympy.Ne)
            raise

    with (
        patch.object(ShapeEnv, "evaluate_sym_node", answered),
        patch.object(_refs, "_reshape_view_helper_core_alg", _reshaped),
    ):
        yield


_reshape = _refs._reshape_view_helper_core_alg


def _reshaped(x: Tensor, shape: Any, allow_copy: bool) -> Tensor:
    """Reshape by strides where they follow for all sizes, without asking what divides what."""
    strides = None
    if any(isinstance(size, torch.SymInt) for size in (*x.shape, *shape)):
        strides = _strides_of_view(x, shape)
    if strides is not None:
        return x.as_strided(shape, strides)
    # What a write behind a view gives may lie otherwise than what it stands for in the trace,
    # where values count and no memory. The model's own views were proved before.
    return _reshape(x, shape, True)


def _strides_of_view(x: Tensor, shape: Sequence[Any]) -> list[Any] | None:
    """Return the strides of a view, as ATen's ``computeStride``; None where sizes decide."""
    known = statically_known_true
    strides: list[Any] = [0] * len(shape)
    axis = len(shape) - 1
    base: Any = x.stride(-1)
    count: Any = 1  # elements of a part that lies in one piece, and of the view's axes over it
    covered: Any = 1
    for d in range(x.dim() - 1, -1, -1):
        count = count * x.shape[d]
        if d and (known(x.shape[d - 1] == 1) or known(x.stride(d - 1) == count * base)):
            continue
        while axis >= 0 and (not known(covered == count) or known(shape[axis] == 1)):
            strides[axis] = covered * base
            covered = covered * shape[axis]
            axis -= 1
        if not known(covered == count):
            return None
        if d:
            base, count, covered = x.stride(d - 1), 1, 1
    return strides if axis < 0 else None


def _refusal(found: Sequence[tuple[str, str]]) -> UnsupportedOperatorError:
    listing = "\n".join(f"  {name} at {line}" for name, line in found)
    return UnsupportedOperatorError(
        "Sizes that depend on data can be compiled where a mask, nonzero or unique makes them; "
        f"these cannot:\n{listing}\n{_ADVICE}",
        tuple(found),
    )


def merge_equal_masks(graph: fx.GraphModule) -> None:
    """Let equal computations be one where sizes depend on them, in place.

    ``logits[labels >= 0]`` and ``labels[labels >= 0]`` have one size only if it is one mask.
    """
    nodes = list(graph.graph.nodes)
    if any(_writes(node) for node in nodes):
        return
    wanted = {source for node in nodes if _counts(node) for source in node.all_input_nodes}
    for node in reversed(nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    known: dict[Any, fx.Node] = {}
    for node in nodes:
        if node.op != "call_function" or node not in wanted or _draws(node):
            continue
        key = (str(node.target), str(node.args), str(node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)
    graph.recompile()


def _counts(node: fx.Node) -> bool:
    return node.target in _COUNTING and bool(node.meta.get("unbacked_bindings"))


def _writes(node: fx.Node) -> bool:
    """Whether a node may change what others read."""
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # arithmetic on sizes, members of tuples; or a nested graph
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    return schema.is_mutable


def _draws(node: fx.Node) -> bool:
    """Whether a second call may give something else."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _CumulativeSum(torch.autograd.Function):
    """``cumsum``; PyTorch's gradient of it asks whether there is more than one element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        """Compute it."""
        ctx.dim, ctx.dtype = dim, x.dtype
        return _ATEN.cumsum.default(x, dim, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Sum the gradients from the other end."""
        summed = gradients[0].to(ctx.dtype).flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim)
        return summed, None, None


def _cumulative_sum(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor | None:
    is_counted = any(free_unbacked_symbols(size) for size in x.shape)
    return _CumulativeSum.apply(x, dim, dtype) if is_counted and x.requires_grad else None


def _that_make_it_empty(size: Any) -> set[sympy.Symbol]:
    """Find the counted sizes without which an axis would be empty: none if others add to it."""
    counted = {*free_unbacked_symbols(size)}
    if not counted:
        return set()
    rest = size.node.expr.xreplace(dict.fromkeys(counted, sympy.S.Zero))
    return set() if size.node.shape_env.bound_sympy(rest).lower >= 1 else counted


class CountedSizes:
    """The operators of one traced function that pick by a mask: each mask is counted once."""

    def __init__(self) -> None:
        self._positions: dict[int, tuple[Tensor, Tensor]] = {}
        self.nonempty: set[sympy.Symbol] = set()  # sizes that must not be 0
        self._symbols: dict[sympy.Symbol, Any] = {}  # of this trace, by those of the export
        self._exported: list[Any] = []

    def look_at(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note what an operator of the model needs of the sizes that are counted."""
        packet = getattr(target, "overloadpacket", None)
        if packet is None or packet.__name__ not in _NEEDS_ONE:
            return
        x = args[0] if args else kwargs.get("self")
        if not isinstance(x, Tensor) or any(isinstance(other, Tensor) for other in args[1:]):
            return
        axes = args[1] if len(args) > 1 else kwargs.get("dim")
        axes = [axes] if isinstance(axes, int) else axes or range(x.dim())
        for axis in axes:
            self.nonempty |= _that_make_it_empty(x.shape[axis])

    def note(self, node: fx.Node, result: Any) -> None:
        """Note what the export relied on of the sizes that a node of its graph counts."""
        for symbol, path in (node.meta.get("unbacked_bindings") or {}).items():
            size = pytree.key_get(result, path)
            if isinstance(size, torch.SymInt):
                self._symbols[symbol] = size.node._expr
                self._exported += conditions_on(node, symbol)

    @property
    def conditions(self) -> tuple[Any, ...]:
        """What the export relied on, which a trace of its graph need not ask for again."""
        return tuple(condition.xreplace(self._symbols) for condition in self._exported)

    def rules(self) -> dict[Any, Callable[..., Any]]:
        """Return rules as :mod:`.decompositions` has them."""
        return {
            _ATEN.index.Tensor: self._index,
            _ATEN.index_put.default: functools.partial(self._put, _ATEN.index_put.default),
            _ATEN.index_put_.default: functools.partial(self._put, _ATEN.index_put_.default),
            _ATEN.cumsum.default: _cumulative_sum,
            _ATEN.masked_select.default: self._masked_select,
            _ATEN.nonzero.default: self._nonzero,
            _ATEN.nonzero_numpy.default: self._where,
            _ATEN.where.default: self._where,
        }

    def _flat_positions(self, mask: Tensor) -> Tensor:
        """Positions of the true elements of a mask, among all of them in order."""
        if id(mask) not in self._positions:
            flat = (mask if mask.dtype == torch.bool else mask != 0).flatten()
            self._positions[id(mask)] = mask, _ATEN.nonzero.default(flat).squeeze(1)
        return self._positions[id(mask)][1]

    def _columns(self, mask: Tensor) -> list[Tensor]:
        """Positions of the true elements along each axis of a mask."""
        places, columns = self._flat_positions(mask), []
        for axis in range(mask.dim() - 1, 0, -1):
            columns.insert(0, places.remainder(mask.shape[axis]))
            places = places.div(mask.shape[axis], rounding_mode="floor")
        return [places, *columns]

    def _index(self, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
        masks = [(axis, i) for axis, i in enumerate(indices) if i is not None]
        if not any(_is_mask(i) for _, i in masks):
            return None
        if len(masks) == 1:
            ((axis, mask),) = masks
            return _merged(x, axis, mask.dim()).index_select(axis, self._flat_positions(mask))
        return _ATEN.index.Tensor(x, self._as_positions(indices))

    def _as_positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        positions: list[Tensor | None] = []
        for index in indices:
            if index is not None and _is_mask(index):
                positions += self._columns(index)
            else:
                positions.append(index)
        return positions

    def _put(
        self,
        operator: Any,
        x: Tensor,
        indices: Sequence[Tensor | None],
        values: Tensor,
        accumulate: bool = False,
    ) -> Tensor | None:
        """Write rows where a mask is true; one value for all is a choice by the mask."""
        if not any(i is not None and _is_mask(i) for i in indices):
            return None
        if all(isinstance(n, int) and n == 1 for n in values.shape):
            return None
        return operator(x, self._as_positions(indices), values, accumulate)

    def _masked_select(self, x: Tensor, mask: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        if tuple(map(str, shape)) != tuple(map(str, mask.shape)):
            mask = mask.expand(shape)
        return x.expand(shape).flatten().index_select(0, self._flat_positions(mask))

    def _nonzero(self, x: Tensor) -> Tensor | None:
        return torch.stack(self._columns(x), 1) if x.dim() else None

    def _where(self, condition: Tensor) -> list[Tensor] | None:
        return self._columns(condition) if condition.dim() else None


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8) and index.dim() > 0


def _merged(x: Tensor, axis: int, count: int) -> Tensor:
    return x if count == 1 else x.flatten(axis, axis + count - 1)


def find_counted(
    graph: fx.GraphModule, taken: Sequence[str], seen: CountedSizes
) -> tuple[CountedSize, ...]:
    """Find the sizes that a traced graph counts, in the order in which it does.

    Masks of which the graph relies on that they select as much as each other have one dim.

    ``graph``: the trace. ``taken``: names that the dims must not have. ``seen``: what was noted
    meanwhile.

    Raises `UnsupportedOperatorError`: an operator makes a size that has no bound here, or the
    trace relies on what a call cannot check.
    """
    names, found = set(taken), []
    needed = set(seen.nonempty)
    counting = [node for node in graph.graph.nodes if node.meta.get("unbacked_bindings")]
    exported = seen.conditions
    known = {symbol for node in counting for symbol in node.meta["unbacked_bindings"]}
    for node in counting:
        bindings = node.meta["unbacked_bindings"]
        if node.target not in _NAMES or len(bindings) != 1:
            raise _refusal([(str(node.target), str(source_line(node)))])
        ((symbol, _),) = bindings.items()
        equal, others = {symbol}, []
        relied_on = [each for each in exported if symbol in each.free_symbols]
        for condition in (*conditions_on(node, symbol), *relied_on):
            if _is_equality(condition):
                equal |= condition.free_symbols
            elif _is_nonzero(condition):
                needed |= condition.free_symbols
            elif is_checkable(condition, known):
                others.append(condition)
            else:
                raise UnsupportedOperatorError(
                    f"{source_line(node)}: the model relies on {condition}, of which {symbol} "
                    "depends on data, so that it cannot be known when a step is called. "
                    f"{_ADVICE}",
                    ((str(node.target), str(source_line(node))),),
                )
        same = next((size for size in found if not size.symbols.isdisjoint(equal)), None)
        if same is not None:
            found[found.index(same)] = replace(
                same, symbols=same.symbols | equal, conditions=(*same.conditions, *others)
            )
            continue
        base = _NAMES[node.target]
        free = (base if k == 1 else f"{base}_{k}" for k in itertools.count(1))
        name = next(each for each in free if each not in names)
        names.add(name)
        source: Any = node.args[0]
        bound = source.meta["val"].numel()
        found.append(CountedSize(node, frozenset(equal), name, bound, 0, tuple(others)))
    return tuple(replace(x, least=int(not needed.isdisjoint(x.symbols))) for x in found)


def _is_equality(condition: Any) -> bool:
    """Whether a condition says that two counted sizes are equal, which calls check."""
    sides = condition.args if isinstance(condition, sympy.Eq) else ()
    return len(sides) == 2 and all(x.is_Symbol and depends_on_data(x) for x in sides)


def _is_nonzero(condition: Any) -> bool:
    """Whether a condition says that one counted size is not 0."""
    if len(condition.free_symbols) != 1:
        return False
    (symbol,) = condition.free_symbols
    known = (symbol >= 1, symbol > 0, sympy.Ne(symbol, 0))
    return depends_on_data(symbol) and condition.canonical in {x.canonical for x in known}


def reaches_results(node: fx.Node) -> bool:
    """Whether the tensors that an operator counts are read, not the number alone."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            value = user.meta.get("val")
            if user.op == "output":
                return True
            if isinstance(value, Tensor) and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def depends_on_data(value: Any) -> bool:
    """Whether a size, or a condition on sizes, holds a symbol that only data tell."""
    return bool(free_unbacked_symbols(value))
