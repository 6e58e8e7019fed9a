"""Keep activations of convolution networks with their channels last between the layers.

The library's convolutions read and write ``[N, *P, C]``, PyTorch's programs speak of
``[N, C, *P]``: every convolution stands between two permutations.  The pass follows what they write
forwards through element-wise operators, reductions and concatenations, computes these with channels
last too, and so leaves a permutation only where something else reads the value.

Limits: a reshape, a matrix product or a kernel of TE ends the way; one dataflow block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax

from relax_disc.transform.functions import without_unused
from relax_disc.transform.simplify.rules import is_call, shape_of

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
        result = tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
        return relax.transform.Normalize()(result)


def _to_last(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _to_first(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def _rewritten(function: relax.Function) -> relax.Function:
    body = function.body
    blocks = [
        _Block(block).run() if isinstance(block, relax.DataflowBlock) else block
        for block in body.blocks
    ]
    return without_unused(
        relax.Function(
            function.params,
            relax.SeqExpr(blocks, body.body, body.span),
            function.ret_ty,
            function.is_pure,
            attrs=function.attrs,
            span=function.span,
        )
    )


class _Block:
    def __init__(self, block: relax.DataflowBlock) -> None:
        self._block = block
        self._bindings: list[Any] = []
        self._values: dict[Any, Any] = {}
        self._last: dict[Any, Any] = {}  # from [N, C, *P] to the same values as [N, *P, C]
        self._builder = relax.BlockBuilder()
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
        if is_call(value, "relax.permute_dims"):
            value = self._permutation(binding.var, value)
        elif isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            last = self._moved(value)
            if last is not None and value.op.name in _REDUCTIONS and not value.attrs.keepdims:
                value = self._typed(last)  # the axes that are left have the same order
            elif last is not None:
                stored = self._emit(last)
                self._last[binding.var] = stored
                value = self._typed(op.permute_dims(stored, _to_first(_rank(stored))))
        self._values[binding.var] = value
        self._bindings.append(relax.VarBinding(binding.var, value, binding.span))

    def _permutation(self, variable: Any, value: Any) -> Any:
        (x,) = value.args
        axes = [int(axis) for axis in value.attrs.axes or ()]
        if len(axes) < 3:
            return value
        if axes == _to_last(len(axes)) and x in self._last:
            return self._last[x]
        source = self._values.get(x)
        if isinstance(source, relax.TupleGetItem):
            source = self._values.get(source.tuple_value)
        if axes == _to_first(len(axes)) and isinstance(source, relax.Call):
            if isinstance(source.op, tvm.ir.Op) and source.op.name in _SOURCES:
                self._last[variable] = x
        return value

    def _moved(self, value: Any) -> Any:
        """Write a call of values that are known with channels last so that its result is too."""
        name = value.op.name
        if name in _ELEMENTWISE:
            rank = _rank_of(shape_of(value))
            if not any(arg in self._last and _rank(arg) == rank for arg in _variables(value.args)):
                return None
            args = [self._operand(arg, rank) for arg in value.args]
            if any(arg is None for arg in args):
                return None
            return relax.Call(value.op, args, value.attrs, value.ty_args)
        if name in _REDUCTIONS and value.args[0] in self._last:
            return self._reduction(value)
        if name == "relax.broadcast_to" and value.args[0] in self._last:
            shape = value.args[1]
            if isinstance(shape, relax.ShapeExpr) and len(shape.values) == _rank(value.args[0]):
                moved = [shape.values[axis] for axis in _to_last(len(shape.values))]
                return op.broadcast_to(self._last[value.args[0]], relax.ShapeExpr(moved))
        if name == "relax.concat" and isinstance(value.args[0], relax.Tuple):
            return self._concatenation(value)
        return None

    def _operand(self, arg: Any, rank: int) -> Any:
        """Return an operand of an element-wise operator with channels last; None if unknown."""
        if isinstance(arg, relax.Var) and arg in self._last:
            if _rank(arg) == rank:
                return self._last[arg]
        if not isinstance(arg.ty, relax.TensorType):
            return arg
        shape = shape_of(arg)
        if shape is None:
            return None
        if not shape:
            return arg
        if len(shape) < rank:
            ones = [tvm.tirx.IntImm("int64", 1)] * (rank - len(shape))
            arg = self._emit(op.reshape(arg, relax.ShapeExpr([*ones, *shape])))
        return self._emit(op.permute_dims(arg, _to_last(rank)))

    def _reduction(self, value: Any) -> Any:
        x, rank = value.args[0], _rank(value.args[0])
        axes = range(rank) if value.attrs.axis is None else value.attrs.axis
        axes = [int(axis) % rank for axis in axes]
        where = _to_first(rank)  # of logical axis i in what is stored
        stored = sorted(where[axis] for axis in axes)
        kept = [where[axis] for axis in range(rank) if axis not in axes]
        reduce: Callable[..., Any] = getattr(op, value.op.name.removeprefix("relax."))
        if value.attrs.keepdims:
            return reduce(self._last[x], stored, True)
        return reduce(self._last[x], stored, False) if kept == sorted(kept) else None

    def _concatenation(self, value: Any) -> Any:
        parts = list(value.args[0].fields)
        if not any(part in self._last for part in _variables(parts)):
            return None
        rank = _rank_of(shape_of(value))
        moved = [self._operand(part, rank) for part in parts]
        if any(part is None for part in moved) or value.attrs.axis is None:
            return None
        return op.concat(moved, _to_first(rank)[int(value.attrs.axis) % rank])

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
    return _rank_of(shape_of(expr))


def _rank_of(shape: Sequence[Any] | None) -> int:
    return -1 if shape is None else len(shape)
