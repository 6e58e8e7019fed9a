"""What one element of a tensor is, as an expression over its indices and the batch.

Labels and masks are computed from the batch by a few integer and boolean operators.  Read through
those, an element of a mask is ``key <= query and attention_mask[batch, key]``, from which follows
who sees whom; and a label is ``labels[batch, length + 1]``, which can be looked at before the step
runs.

An expression is plain data: a number, or a tuple ``(kind, *parts)``.  ``("index", name)`` is one of
the indices asked about, ``("size", name)`` a dim, ``("load", parameter, *indices)`` an element of
the batch, ``("unknown", n)`` what cannot be read, each n being another value, ``("rounded", x)`` x
in another type, ``("argmax", x, n)`` where x, over ``("index", "inner")`` below n, is greatest for
the first time, ``("sum", x, n)`` and ``("amax", x, n)`` its sum and its greatest value,
``("cumsum", x, n, i)`` its sum up to ``i``, that with it;
``("biased", x)`` is x plus some number that is small beside what hides a key; all others are the
operators of `OPERATORS` over expressions.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.element import is_guard
from relax_disc.analysis.kernels.stages import Stage, constant, is_buffer, read_stages
from relax_disc.analysis.padding.cumulated import cumulated_axis
from relax_disc.analysis.padding.grid import Grid, Rows, constant_of
from relax_disc.analysis.padding.small import is_small
from relax_disc.ops import aten, registry

Value = Any
"""An expression, see the module."""

OPERATORS = frozenset(
    "add sub mul floordiv mod min max lt le gt ge eq ne and or not choose truth".split()
)

OVER = ("argmax", "sum", "amax", "cumsum")
"""Kinds of expressions that run over an axis."""

BATCH, LENGTH, QUERY, KEY, ROW, INNER = (
    ("index", name) for name in ("batch", "length", "query", "key", "row", "inner")
)

_RELAX = {
    "relax.add": "add",
    "relax.subtract": "sub",
    "relax.multiply": "mul",
    "relax.minimum": "min",
    "relax.maximum": "max",
    "relax.less": "lt",
    "relax.less_equal": "le",
    "relax.greater": "gt",
    "relax.greater_equal": "ge",
    "relax.equal": "eq",
    "relax.not_equal": "ne",
    "relax.logical_and": "and",
    "relax.logical_or": "or",
    "relax.logical_not": "not",
    "relax.where": "choose",
}
_PRIM: dict[type, str] = {
    prim.Add: "add",
    prim.Sub: "sub",
    prim.Mul: "mul",
    prim.FloorDiv: "floordiv",
    prim.FloorMod: "mod",
    prim.Min: "min",
    prim.Max: "max",
    prim.LT: "lt",
    prim.LE: "le",
    prim.GT: "gt",
    prim.GE: "ge",
    prim.EQ: "eq",
    prim.NE: "ne",
    prim.And: "and",
    prim.Or: "or",
}
_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
_COMPARED = {kind: getattr(operator, kind) for kind in _OPPOSITE}
_MOST_DEPTH = 200


class Elements:
    """Reads elements of the tensors of one function.

    ``definitions``: what each variable is bound to. ``batch``: the parameters that a caller gives
    anew each time. ``module``: holds the kernels. ``tables``: the parameters that are the
    model's; None: a bias is read as any other number.
    """

    def __init__(
        self,
        definitions: Mapping[Any, Any],
        batch: Sequence[Any],
        module: tvm.IRModule,
        grid: Grid,
        tables: Container[Any] | None = None,
    ) -> None:
        self._definitions, self._module, self._grid = definitions, module, grid
        self._tables = tables
        self._batch = {var: var.name for var in batch}
        self._whole = {v.name for v in batch if registry.dtype_name(v.ty) in ("int32", "int64")}
        self._unknown = 0
        self._depth = 0

    def value(self, expr: Any, indices: Sequence[Value]) -> Value:
        """Return the element of a tensor at some indices; ``("unknown", n)``: it cannot be read."""
        if self._depth > _MOST_DEPTH:
            return self._anything()
        self._depth += 1
        try:
            return self._read(expr, list(indices))
        finally:
            self._depth -= 1

    def is_whole(self, value: Value) -> bool:
        """Whether a value is made of wide whole numbers of the batch, indices and sizes alone."""
        if not isinstance(value, tuple):
            return isinstance(value, int)
        kind, *parts = value
        if kind in ("index", "size"):
            return True
        if kind == "load":
            return parts[0] in self._whole and all(map(self.is_whole, parts[1:]))
        return kind in ("add", "sub", "mul", "min", "max") and all(map(self.is_whole, parts))

    def _anything(self) -> Value:
        self._unknown += 1
        return ("unknown", self._unknown)

    def _read(self, expr: Any, indices: list[Value]) -> Value:
        if isinstance(expr, tvm.ir.GenericConst):
            number = constant_of(expr)
            return self._anything() if number is None else number
        if expr in self._batch:
            element = ("load", self._batch[expr], *indices)
            return ("truth", element) if registry.dtype_name(expr.ty) == "bool" else element
        value: Any = self._definitions.get(expr) if isinstance(expr, relax.Var) else expr
        if isinstance(value, relax.Var | tvm.ir.GenericConst):
            return self.value(value, indices)
        if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
            return self._anything()
        name = value.op.name
        if name == "relax.call_tir":
            return self._kernel(value, indices)
        if name == "relax.full" and isinstance(value.args[1], tvm.ir.GenericConst):
            return self.value(value.args[1], [])
        if name in ("relax.reshape", "relax.expand_dims", "relax.squeeze"):
            return self._reshape(value.args[0], _shape(expr), indices)
        if name == "relax.broadcast_to":
            return self._broadcast(value.args[0], indices)
        if name == "relax.permute_dims" and value.attrs.axes is not None:
            source: list[Value] = [0] * len(indices)
            for axis, index in zip(value.attrs.axes, indices, strict=True):
                source[int(axis) % len(indices)] = index
            return self.value(value.args[0], source)
        if name == "relax.astype":
            return self._cast(value.args[0], registry.dtype_name(value.ty), indices)
        if name in ("relax.bitwise_and", "relax.bitwise_or"):
            parts = [self._broadcast(arg, indices) for arg in value.args]
            if all(is_truth(part) for part in parts):
                return simplify(("and" if name.endswith("and") else "or", *parts))
            return self._anything()
        if name == "relax.bitwise_xor":
            bits, one = (self._broadcast(arg, indices) for arg in value.args)
            return simplify(("not", bits)) if is_truth(bits) and one == 1 else self._anything()
        if name == "relax.concat" and isinstance(value.args[0], relax.Tuple):
            axis = 0 if value.attrs.axis is None else int(value.attrs.axis) % len(indices)
            return self._concat(value.args[0].fields, axis, indices)
        if name == "relax.call_dps_packed":
            return self._library(value, indices)
        if name in ("relax.sum", "relax.max") and len(value.attrs.axis or ()) == 1:
            kind, (axis,) = "sum" if name == "relax.sum" else "amax", value.attrs.axis
            is_whole = "int" in registry.dtype_name(value.args[0].ty)
            keeps = bool(value.attrs.keepdims)
            return self._over(kind, value.args[0], int(axis), keeps, indices, is_whole)
        if name == "relax.add" and self._tables is not None and _is_float(value):
            known = self._definitions, self._tables, self._module
            biases = [is_small(arg, *known) for arg in value.args]
            if biases in ([True, False], [False, True]):
                return ("biased", self._broadcast(value.args[biases[0]], indices))
        if name in _RELAX:
            return simplify((_RELAX[name], *(self._broadcast(a, indices) for a in value.args)))
        return self._anything()

    def _concat(self, parts: Sequence[Any], axis: int, indices: list[Value]) -> Value:
        """One of the parts, by where the index lies."""
        first, *rest = parts
        value = self.value(first, indices)
        if not rest:
            return value
        index, extent = indices[axis], size_of(_shape(first)[axis])
        behind = list(indices)
        behind[axis] = simplify(("sub", index, extent))
        others = self._concat(rest, axis, behind)
        return simplify(("choose", ("lt", index, extent), value, others))

    def _broadcast(self, expr: Any, indices: list[Value]) -> Value:
        shape = _shape(expr)
        own = indices[len(indices) - len(shape) :]
        return self.value(expr, [0 if _is_one(n) else i for n, i in zip(shape, own, strict=True)])

    def _cast(self, operand: Any, dtype: str, indices: list[Value]) -> Value:
        value = self.value(operand, indices)
        if dtype == "bool":
            is_whole = "int" in registry.dtype_name(operand.ty)
            return _truth(value, is_whole)
        # Others may be rounded or cut.
        is_exact = registry.dtype_name(operand.ty).startswith("int") and dtype == "int64"
        return value if is_exact or is_truth(value) else ("rounded", value)

    def _reshape(self, operand: Any, shape: list[Any], indices: list[Value]) -> Value:
        """Elements through axes of one that come and go, and rows as one axis or two."""
        target = [(n, i) for n, i in zip(shape, indices, strict=True) if not _is_one(n)]
        source = _shape(operand)
        kept = [axis for axis, n in enumerate(source) if not _is_one(n)]
        extents = [source[axis] for axis in kept]
        if len(extents) == len(target) and all(
            tvm_ffi.structural_equal(a, b) for a, (b, _) in zip(extents, target, strict=True)
        ):
            found = [i for _, i in target]
        else:
            rows = self._grid.rows_of_shape([n for n, _ in target])
            pair = self._grid.rows_of_shape(extents)
            is_merged = rows.layout == "merged" and len(target) == 1 and target[0][1] == ROW
            if not (is_merged and len(extents) == 2 and pair == Rows("both", 0, 1, rows.of)):
                return self._anything()
            found = [BATCH, LENGTH]
        full: list[Value] = [0] * len(source)
        for axis, index in zip(kept, found, strict=True):
            full[axis] = index
        return self.value(operand, full)

    def _library(self, call: relax.Call, indices: list[Value]) -> Value:
        """Read what PyTorch's own kernels make of one operand by its indices alone."""
        if call.args[0].global_symbol != aten.CALL:
            return self._anything()
        text, _, *operands = call.args[1].fields
        if not operands or not isinstance(operands[0].ty, relax.TensorType):
            return self._anything()
        recipe, shape = json.loads(text.value), _shape(operands[0])
        match recipe["operator"], recipe["arguments"][1:]:
            case "aten::roll", [["list", [["int", by]]], ["list", [["int", axis]]]]:
                where = list(indices)
                where[axis] = ("mod", ("sub", where[axis], by), size_of(shape[axis]))
                return self.value(operands[0], where)
            case "aten::fmod", [["operand", 1]]:
                value, divisor = self.value(operands[0], indices), size_of(operands[1])
                if _is_natural(value) and _is_natural(divisor):  # else by the sign of the first
                    return ("mod", value, divisor)
            case "aten::remainder", [["operand", 1]]:
                value, divisor = self.value(operands[0], indices), size_of(operands[1])
                if "int" in registry.dtype_name(call.ty) and _is_natural(divisor):
                    return ("mod", value, divisor)
            case "aten::cat", [["int", axis]]:
                return self._concat(operands, axis % len(shape), indices)
            case "aten::argmax", [["int", axis], ["bool", keeps]]:
                return self._over("argmax", operands[0], axis, keeps, indices)
        return self._anything()

    def _over(
        self,
        kind: str,
        operand: Any,
        axis: int,
        keeps_axis: bool,
        indices: list[Value],
        is_whole: bool = True,
        at: tuple[Value, ...] = (),
    ) -> Value:
        """Read what is made of one axis, for each sequence, and at some index for each row."""
        shape = _shape(operand)
        axis %= len(shape)
        where = [*indices[:axis], INNER, *indices[axis + keeps_axis :]]
        value = self.value(operand, where)
        is_nested = any(mentions(value, each) for each in OVER)
        if not is_whole or is_nested or mentions_others(value, (BATCH, INNER)):
            return self._anything()
        return (kind, value, size_of(shape[axis]), *at)

    def _kernel(self, call: relax.Call, indices: list[Value]) -> Value:
        axis = cumulated_axis(self._module[call.args[0]])
        if axis is not None:
            (operand,) = call.args[1].fields
            is_whole = "int" in registry.dtype_name(call.ty)
            at = (indices[axis],)
            return self._over("cumsum", operand, axis, True, indices, is_whole, at)
        reader = self.reader(call, indices)
        return self._anything() if reader is None else reader.read()

    def reader(self, call: relax.Call, indices: list[Value]) -> StageReader | None:
        """Return what reads one element of what a kernel of one stage makes; None: of others."""
        kernel = self._module[call.args[0]]
        read = read_stages(kernel)
        if read is None or len(read.stages) != 1:
            return None
        (stage,) = read.stages
        buffers = [param for param in kernel.params if is_buffer(param)]
        operands = [arg for arg in call.args[1].fields if isinstance(arg.ty, relax.TensorType)]
        if stage.lets or stage.reduced or len(buffers) != len(operands) + 1:
            return None
        given = dict(zip(buffers, operands, strict=False))
        return StageReader(self, stage, given, self._sizes(kernel, call, operands), indices)

    def _sizes(self, kernel: Any, call: relax.Call, operands: list[Any]) -> dict[Any, Value]:
        """What the kernel's own dims are in the caller's."""
        shapes = [_shape(operand) for operand in operands] + [list(call.ty_args[0].shape.values)]
        buffers = [param for param in kernel.params if is_buffer(param)]
        sizes: dict[Any, Value] = {}
        for buffer, shape in zip(buffers, shapes, strict=True):
            for own, outer in zip(buffer.shape, shape, strict=True):
                if isinstance(own, tirx.Var):
                    sizes[own] = size_of(outer)
        for own, arg in zip(kernel.params, call.args[1].fields, strict=False):
            if not is_buffer(own):
                sizes[own] = size_of(arg)
        return sizes


class StageReader:
    """Reads one element of a kernel's result."""

    def __init__(
        self,
        elements: Elements,
        stage: Stage,
        operands: dict[Any, Any],
        sizes: dict[Any, Value],
        indices: list[Value],
    ) -> None:
        self._elements, self._stage, self._operands = elements, stage, operands
        self._values = dict(sizes)
        self._fits = len(stage.indices) == len(indices)
        for own, index in zip(stage.indices, indices, strict=False):
            if isinstance(own, tirx.Var):
                self._values[own] = index
            elif constant(own) != 0:
                self._fits = False

    def read(self) -> Value:
        """Read the element itself."""
        if not self._fits:
            return self._elements._anything()
        return self.value(self._stage.value)

    def value(self, expr: Any) -> Value:
        """Read an expression of the kernel."""
        number = constant(expr)
        if number is not None:
            return number
        if isinstance(expr, prim.FloatImm):
            return float(expr.value)
        if isinstance(expr, tvm.ir.TensorLoad):
            indices = [self.value(index) for index in expr.indices]
            if expr.source not in self._operands:
                return self._elements._anything()
            return self._elements.value(self._operands[expr.source], indices)
        if isinstance(expr, tirx.Var):
            known = self._values.get(expr)
            return self._elements._anything() if known is None else known
        if isinstance(expr, prim.Cast):
            return self.value(expr.value)
        if isinstance(expr, prim.Not):
            return simplify(("not", self.value(expr.a)))
        if isinstance(expr, prim.Select):
            parts = (expr.condition, expr.true_value, expr.false_value)
            return simplify(("choose", *map(self.value, parts)))
        if is_guard(expr):
            return simplify(("choose", *map(self.value, expr.args)))
        operator = _PRIM.get(type(expr))
        if operator is None:
            return self._elements._anything()
        return simplify((operator, self.value(expr.a), self.value(expr.b)))


def simplify(value: Value) -> Value:
    """Fold what is decided whatever the batch holds; indices and sizes are never negative."""
    kind, *parts = value
    if kind == "and":
        if any(part is False or part == 0 for part in parts):
            return False
        rest = [part for part in parts if part is not True and part != 1]
        return True if not rest else rest[0] if len(rest) == 1 else value
    if kind == "not" and isinstance(parts[0], tuple):
        inner, *rest = parts[0]
        if inner == "not":
            return rest[0]
        if inner == "eq" and rest[1] == 0:
            return _truth(rest[0])
        if inner in _OPPOSITE and not mentions(parts[0], "load"):  # of whole numbers
            return (_OPPOSITE[inner], *rest)
    if kind == "choose" and isinstance(parts[0], bool):
        return parts[1] if parts[0] else parts[2]
    if kind == "lt" and parts[1] == 0 and _is_natural(parts[0]):
        return False
    if kind == "ge" and parts[1] == 0 and _is_natural(parts[0]):
        return True
    if kind == "le" and parts[0] == 0 and _is_natural(parts[1]):
        return True
    if kind in _OPPOSITE and isinstance(parts[0], tuple) and parts[0][0] == "choose":
        condition, *sides = parts[0][1:]
        if all(isinstance(each, int | float) for each in (*sides, parts[1])):
            yes, no = (_COMPARED[kind](side, parts[1]) for side in sides)
            return yes if yes == no else condition if yes else simplify(("not", condition))
    if kind == "ne" and parts[1] == 0:
        return _truth(parts[0])
    if kind in ("add", "sub") and parts[1] == 0:
        return parts[0]
    if kind == "add" and parts[0] == 0:
        return parts[1]
    if kind == "mul" and parts[1] == 1:
        return parts[0]
    return value


def conditions(value: Value) -> list[Value]:
    """List what must hold, each, for a boolean expression to be true."""
    if isinstance(value, tuple) and value[0] == "and":
        return [each for part in value[1:] for each in conditions(part)]
    return [value]


def mentions(value: Value, kind: str) -> bool:
    """Whether an expression has a part of a kind."""
    if not isinstance(value, tuple):
        return False
    return value[0] == kind or any(mentions(part, kind) for part in value[1:])


def sizes_in(value: Value) -> set[str]:
    """Name the dims that an expression mentions."""
    if not isinstance(value, tuple):
        return set()
    if value[0] == "size":
        return {value[1]}
    return {name for part in value[1:] for name in sizes_in(part)}


def mentions_others(value: Value, indices: Sequence[Value]) -> bool:
    """Whether an expression depends on other indices than these."""
    if not isinstance(value, tuple):
        return False
    if value[0] == "index":
        return value not in indices
    if value[0] in OVER:
        _, inside, extent, *at = value
        return mentions_others(inside, [*indices, INNER]) or any(
            mentions_others(part, indices) for part in (extent, *at)
        )
    return any(mentions_others(part, indices) for part in value[1:])


def is_readable(value: Value) -> bool:
    """Whether a value can be computed from the batch, exactly."""
    return not any(mentions(value, kind) for kind in ("unknown", "rounded", "biased"))


def replaced(value: Value, old: Value, new: Value) -> Value:
    """Put one expression for another throughout."""
    if value == old:
        return new
    if not isinstance(value, tuple):
        return value
    return tuple(replaced(part, old, new) for part in value)


def _is_natural(value: Value) -> bool:
    if isinstance(value, tuple):
        if value[0] in ("index", "size", "argmax", "truth"):
            return True
        if value[0] == "sub" and value[2] == 1:
            return isinstance(value[1], tuple) and value[1][0] == "size"
        return value[0] in ("add", "mul", "min", "mod") and all(map(_is_natural, value[1:]))
    return value >= 0


def _truth(value: Value, is_whole: bool = False) -> Value:
    """Whether a value is not zero; a product of whole numbers is not if none of them is."""
    if is_truth(value):
        return value
    if is_whole and isinstance(value, tuple) and value[0] == "mul":
        return simplify(("and", *(_truth(part, is_whole) for part in value[1:])))
    return simplify(("truth", value))


def is_truth(value: Value) -> bool:
    """Whether a value is true or false, or 1 or 0 for those."""
    if isinstance(value, tuple):
        return value[0] in ("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "truth")
    return isinstance(value, bool)


def size_of(extent: Any) -> Value:
    """Write an extent as an expression."""
    number = constant(extent)
    if number is not None:
        return number
    if isinstance(extent, tirx.Var):
        return ("size", extent.name)
    operator = _PRIM.get(type(extent))
    if operator in ("add", "sub", "mul"):
        return simplify((operator, size_of(extent.a), size_of(extent.b)))
    return ("unknown", 0)


def _is_float(expr: Any) -> bool:
    return registry.dtype_name(expr.ty).startswith("float")


def _shape(expr: Any) -> list[Any]:
    return list(expr.ty.shape.values)


def _is_one(extent: Any) -> bool:
    return constant(extent) == 1
