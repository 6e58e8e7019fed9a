"""Keep activations of convolution networks with their channels last between the layers.

The library's convolutions read and write ``[N, *P, C]``, PyTorch's programs speak of
``[N, C, *P]``: every convolution stands between two permutations.  The pass follows what they write
forwards through element-wise operators, reductions, concatenations, slices, permutations, and
reshapes that split or join axes which lie next to each other (the groups of group norm, the tokens
of attention).  It computes these in the order of the axes in memory too, and so leaves a
permutation only where something else reads the value.

Limits: a matrix product or a kernel of TE ends the way; one dataflow block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.sym.analyzer import Analyzer

from relax_disc.analysis.kernels.stages import constant
from relax_disc.ops.operand_views import is_call_of
from relax_disc.transform.functions import copy_module, with_blocks, without_unused
from relax_disc.transform.simplify.rules import shape_of

op: Any = relax.op

_SOURCES = ("relax_disc.convolution", "relax_disc.convolution_input", "relax.call_dps_packed")

_ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in """
    abs acos acosh add asin asinh astype atan atanh ceil clip cos cosh divide equal erf exp floor
    floor_divide floor_mod greater greater_equal isfinite isinf isnan less less_equal log
    logical_and logical_not logical_or logical_xor maximum minimum mod multiply negative not_equal
    power round rsqrt sigmoid sign sin sinh sqrt square subtract tan tanh trunc where nn.gelu
    nn.gelu_tanh nn.leakyrelu nn.relu nn.silu nn.softplus
    """.split()
)
_REDUCTIONS = frozenset(f"relax.{name}" for name in ("max", "mean", "min", "prod", "sum"))


@tvm.transform.module_pass(opt_level=0, name="ChannelsLast")
class ChannelsLast:
    """Compute with channels last what convolutions lead to; see the module."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite the Relax functions that hold a convolution."""
        del ctx
        functions = dict(mod.functions_items())
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
                functions[variable] = _rewritten(function)
        return relax.transform.Normalize()(copy_module(mod, functions))


def _to_first(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def _inverse(axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axes.index(axis) for axis in range(len(axes)))


def _count(extents: Sequence[Any]) -> Any:
    return prod(extents, start=tirx.IntImm("int64", 1))


def _rewritten(function: relax.Function) -> relax.Function:
    blocks = [
        _Block(block).run() if isinstance(block, relax.DataflowBlock) else block
        for block in function.body.blocks
    ]
    return without_unused(with_blocks(function, blocks))


@dataclass(frozen=True, slots=True)
class _Stored:
    """How a value lies in memory: axis i of `tensor` is the value's axis ``order[i]``."""

    tensor: Any
    order: tuple[int, ...]
    # whether a convolution wrote it: then what is computed of it is stored so, too
    leads: bool


class _Block:
    def __init__(self, block: relax.DataflowBlock) -> None:
        self._block = block
        self._bindings: list[Any] = []
        self._values: dict[Any, Any] = {}
        self._stored: dict[Any, _Stored] = {}
        self._builder = relax.BlockBuilder()
        self._analyzer = Analyzer()
        self._origin: Any = None

    def run(self) -> relax.DataflowBlock:
        for binding in self._block.bindings:
            if isinstance(binding, relax.VarBinding):
                self._origin = binding
                self._visit(binding)
            else:
                self._bindings.append(binding)
        return relax.DataflowBlock(self._bindings, self._block.span)

    def _visit(self, binding: Any) -> None:
        value = binding.value
        if is_call_of(value, "relax.permute_dims"):
            value = self._permutation(binding.var, value)
        elif is_call_of(value, "relax.reshape"):
            value = self._reshape(binding.var, value)
        elif isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            moved = self._moved(value)
            if moved is not None:
                value = self._settled(binding.var, *moved)
        self._values[binding.var] = value
        self._bindings.append(relax.VarBinding(binding.var, value, binding.span))

    def _settled(self, variable: Any, value: Any, order: tuple[int, ...]) -> Any:
        """Write down what is stored in some order; return the variable's own value."""
        value = self._typed(value)
        shape = shape_of(value)
        assert shape is not None
        large = [axis for axis, extent in zip(order, shape, strict=True) if constant(extent) != 1]
        if list(order) == sorted(order):
            return value
        stored = self._emit(value)
        if large != sorted(large):
            self._stored[variable] = _Stored(stored, order, True)
        return self._typed(op.permute_dims(stored, _inverse(order)))

    def _permutation(self, variable: Any, value: Any) -> Any:
        (x,) = value.args
        axes = [int(axis) for axis in value.attrs.axes or ()]
        if len(axes) < 3:
            return value
        known = self._stored.get(x)
        if known is None:
            source: Any = self._values.get(x)
            if isinstance(source, relax.TupleGetItem):
                source = self._values.get(source.tuple_value)
            called = isinstance(source, relax.Call) and isinstance(source.op, tvm.ir.Op)
            leads = called and source.op.name in _SOURCES and axes == _to_first(len(axes))
            self._stored[variable] = _Stored(x, _inverse(axes), leads)
            return value
        order = tuple(axes.index(axis) for axis in known.order)
        if list(order) == sorted(order):
            return known.tensor
        self._stored[variable] = _Stored(known.tensor, order, known.leads)
        return value

    def _reshape(self, variable: Any, value: Any) -> Any:
        known, before, after = (
            self._stored.get(value.args[0]),
            *map(shape_of, (value.args[0], value)),
        )
        if known is None or before is None or after is None:
            return value
        order = self._regrouped(known.order, before, after)
        if order is None:
            return value
        shape = relax.ShapeExpr([after[axis] for axis in order])
        if known.leads:
            return self._settled(variable, op.reshape(known.tensor, shape), order)
        stored = self._emit(op.reshape(known.tensor, shape))
        self._stored[variable] = _Stored(stored, order, False)
        return value

    def _regrouped(
        self, order: Sequence[int], before: list[Any], after: list[Any]
    ) -> tuple[int, ...] | None:
        """Order in which the axes of a reshaped value are stored; None if its axes are mixed."""
        runs = self._runs(before, after)
        if runs is None:
            return None
        order = [axis for axis in order if constant(before[axis]) != 1]
        found: dict[int, range] = {}  # from the first large axis before to the axes after
        for old, new in runs:
            large = [axis for axis in old if constant(before[axis]) != 1]
            if large:
                first = order.index(large[0])
                if order[first : first + len(large)] != large:
                    return None
                found[large[0]] = new
        large = [axis for old in order for axis in found.get(old, ())]
        return (*large, *(axis for axis in range(len(after)) if axis not in large))

    def _runs(self, before: list[Any], after: list[Any]) -> list[tuple[range, range]] | None:
        """Cut two shapes into as many runs of axes as possible, with equal products."""
        runs: list[tuple[range, range]] = []
        i = j = 0
        while i < len(before) and j < len(after):
            ends = product(range(i + 1, len(before) + 1), range(j + 1, len(after) + 1))
            for k, m in sorted(ends, key=sum):
                if self._analyzer.can_prove_equal(_count(before[i:k]), _count(after[j:m])):
                    break
            else:
                return None
            runs.append((range(i, k), range(j, m)))
            i, j = k, m
        return runs if all(constant(n) == 1 for n in (*before[i:], *after[j:])) else None

    def _moved(self, value: Any) -> tuple[Any, tuple[int, ...]] | None:
        """Write a call of stored values so that its result is stored so; with that order."""
        name = value.op.name
        if name in _ELEMENTWISE:
            rank = _rank(value)
            known = self._leading(value.args, rank)
            if known is None:
                return None
            args = [self._operand(arg, known.order) for arg in value.args]
            if any(arg is None for arg in args):
                return None
            return relax.Call(value.op, args, value.attrs, value.ty_args), known.order
        if name == "relax.concat" and isinstance(value.args[0], relax.Tuple):
            return self._concatenation(value)
        if name not in (*_REDUCTIONS, "relax.broadcast_to", "relax.strided_slice"):
            return None
        known = self._leading(value.args[:1], _rank(value.args[0]))
        if known is None:
            return None
        if name in _REDUCTIONS:
            return self._reduction(value, known)
        if name == "relax.strided_slice":
            return self._slice(value, known)
        shape = value.args[1]
        if not isinstance(shape, relax.ShapeExpr) or len(shape.values) != len(known.order):
            return None
        moved = relax.ShapeExpr([shape.values[axis] for axis in known.order])
        return op.broadcast_to(known.tensor, moved), known.order

    def _leading(self, args: Sequence[Any], rank: int) -> _Stored | None:
        """Return the first of some values that says how what is computed of them is stored."""
        found = (self._stored.get(arg) for arg in _variables(args))
        return next((x for x in found if x and x.leads and len(x.order) == rank), None)

    def _operand(self, arg: Any, order: tuple[int, ...]) -> Any:
        """Return an operand of an element-wise operator stored in an order; None if unknown."""
        if isinstance(arg, relax.Var) and arg in self._stored:
            if self._stored[arg].order == order:
                return self._stored[arg].tensor
        if not isinstance(arg.ty, relax.TensorType):
            return arg
        shape = shape_of(arg)
        if shape is None:
            return None
        if not shape:
            return arg
        if len(shape) < len(order):
            ones = [tirx.IntImm("int64", 1)] * (len(order) - len(shape))
            arg = self._emit(op.reshape(arg, relax.ShapeExpr([*ones, *shape])))
        return self._emit(op.permute_dims(arg, list(order)))

    def _reduction(self, value: Any, known: _Stored) -> tuple[Any, tuple[int, ...]]:
        """Reduce the stored tensor by one run of its axes after the other, the last ones last."""
        x, order, shape = known.tensor, known.order, shape_of(known.tensor)
        assert shape is not None
        rank = len(order)
        axes = range(rank) if value.attrs.axis is None else value.attrs.axis
        axes = {int(axis) % rank for axis in axes}
        gone = [place for place, axis in enumerate(order) if axis in axes]
        runs: list[list[int]] = [[]]
        for place in (place for place in range(rank) if constant(shape[place]) != 1):
            if place in gone:
                runs[-1].append(place)
            elif runs[-1]:
                runs.append([])
        reduce: Callable[..., Any] = getattr(op, value.op.name.removeprefix("relax."))
        keeps = bool(value.attrs.keepdims)
        for run in filter(None, runs):
            x = self._emit(self._reduced(reduce, x, run, keeps or run != gone))
        extents = [
            tirx.IntImm("int64", 1) if place in gone else extent
            for place, extent in enumerate(shape)
            if keeps or place not in gone
        ]
        if not keeps:
            kept = sorted(set(range(rank)) - axes)
            order = tuple(kept.index(axis) for axis in order if axis not in axes)
        return op.reshape(x, relax.ShapeExpr(extents)), order

    def _reduced(self, reduce: Callable[..., Any], x: Any, axes: list[int], keeps: bool) -> Any:
        """Reduce some axes, to extents of one or none: before a reshape, to fuse what makes x."""
        source: Any = self._values.get(x)
        shape = shape_of(x)
        assert shape is not None
        if is_call_of(source, "relax.reshape"):
            before = shape_of(source.args[0])
            runs = None if before is None else self._runs(before, shape)
            ends = [] if runs is None else [(old, set(new) <= set(axes), new) for old, new in runs]
            whole = {axis for _, is_gone, new in ends if is_gone for axis in new}
            if whole == set(axes):
                inner = [axis for old, is_gone, _ in ends if is_gone for axis in old]
                left = [
                    1 if axis in axes else extent
                    for axis, extent in enumerate(shape)
                    if keeps or axis not in axes
                ]
                less = self._emit(reduce(source.args[0], inner, False))
                return op.reshape(less, relax.ShapeExpr(left))
        return reduce(x, axes, keeps)

    def _slice(self, value: Any, known: _Stored) -> tuple[Any, tuple[int, ...]] | None:
        """Slice the stored tensor along the same axes."""
        axes, *bounds = value.args[1:]
        if not isinstance(axes, relax.Tuple):
            return None
        places = [known.order.index(int(axis) % len(known.order)) for axis in axes.fields]
        moved = relax.Tuple([tirx.IntImm("int64", place) for place in places])
        args = [known.tensor, moved, *bounds]
        return relax.Call(value.op, args, value.attrs, value.ty_args), known.order

    def _concatenation(self, value: Any) -> tuple[Any, tuple[int, ...]] | None:
        parts = list(value.args[0].fields)
        known = self._leading(parts, _rank(value))
        if known is None or value.attrs.axis is None:
            return None
        moved = [self._operand(part, known.order) for part in parts]
        if any(part is None for part in moved):
            return None
        axis = int(value.attrs.axis) % len(known.order)
        return op.concat(moved, known.order.index(axis)), known.order

    def _typed(self, value: Any) -> Any:
        origin = self._origin.value
        if isinstance(value, relax.Call) and value.span is None:
            value = relax.Call(value.op, value.args, value.attrs, value.ty_args, origin.span)
        return self._builder.normalize(value)

    def _emit(self, value: Any) -> Any:
        value = self._typed(value)
        name = f"{self._origin.var.name}_last"
        variable = relax.DataflowVar(name, value.ty, self._origin.span)
        self._values[variable] = value
        self._bindings.append(relax.VarBinding(variable, value, self._origin.span))
        return variable


def _variables(args: Sequence[Any]) -> list[Any]:
    return [arg for arg in args if isinstance(arg, relax.Var)]


def _rank(expr: Any) -> int:
    shape = shape_of(expr)
    return -1 if shape is None else len(shape)
