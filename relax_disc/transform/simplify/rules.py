"""The rewrites of `Simplify`: operator name -> rules ``rule(call, graph) -> Expr or None``.

A rule answers None when it has nothing to simplify.  The graph follows variables to their
definitions (`graph.definition`) and binds intermediate results (`graph.emit`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.sym.analyzer import Analyzer

from relax_disc.ops.operand_views import is_call_of
from relax_disc.ops.registry import dtype_name

op = relax.op

# Views that cost nothing, or next to nothing, and so are worth sharing at any distance.
SHARED = frozenset({"relax.reshape", "relax.permute_dims"})

_ANALYZER = Analyzer()

# (from, to): every value of the first type is a value of the second.
_WIDER = {
    "bool": ("int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"),
    "int8": ("int16", "int32", "int64", "float16", "float32", "float64"),
    "uint8": ("int16", "int32", "int64", "float16", "float32", "float64"),
    "int16": ("int32", "int64", "float32", "float64"),
    "int32": ("int64", "float64"),
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}


def shape_of(expr: Any) -> list[Any] | None:
    """Extents of a tensor, None when they are not known."""
    kind = expr.ty
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        return None
    return kind.shape.values[:]


def same_shape(left: Sequence[Any] | None, right: Sequence[Any] | None) -> bool:
    """Whether two shapes are known and provably equal."""
    if left is None or right is None or len(left) != len(right):
        return False
    return all(_ANALYZER.can_prove_equal(a, b) for a, b in zip(left, right, strict=True))


def scalar(expr: Any) -> float | None:
    """Value of a constant with one element, None for anything else."""
    if not isinstance(expr, tvm.ir.GenericConst) or not hasattr(expr.value, "numpy"):
        return None
    if "bfloat16" in str(expr.value.dtype):
        return None
    value = expr.value.numpy()
    return float(value.reshape(())) if value.size == 1 else None


def _axes(call: Any, rank: int) -> list[int]:
    axes = call.attrs.axes
    return list(range(rank))[::-1] if axes is None else [int(axis) % rank for axis in axes]


# -- views ----------------------------------------------------------------------------------------


def compose_permutations(call: Any, graph: Any) -> Any:
    """Two permutations are one; one that moves nothing is none."""
    (x,) = call.args
    shape = shape_of(x)
    if shape is None:
        return None
    axes = _axes(call, len(shape))
    inner = graph.definition(x)
    if is_call_of(inner, "relax.permute_dims"):
        first = _axes(inner, len(shape))
        return op.permute_dims(inner.args[0], [first[axis] for axis in axes])
    return x if axes == sorted(axes) else None


def permutation_as_reshape(call: Any, graph: Any) -> Any:
    """A permutation that moves only axes of extent 1 moves no data."""
    (x,) = call.args
    shape = shape_of(x)
    if shape is None:
        return None
    axes = _axes(call, len(shape))
    large = [axis for axis in axes if not _ANALYZER.can_prove_equal(shape[axis], 1)]
    if large != sorted(large):
        return None
    return op.reshape(x, relax.ShapeExpr([shape[axis] for axis in axes]))


def view_as_reshape(call: Any, graph: Any) -> Any:
    """``expand_dims``, ``squeeze`` and ``flatten`` are reshapes; so chains of them are one."""
    shape = shape_of(_typed(call))
    return None if shape is None else op.reshape(call.args[0], relax.ShapeExpr(shape))


def compose_reshapes(call: Any, graph: Any) -> Any:
    """Two reshapes are one; one to the same shape is none."""
    x, shape = call.args
    inner = graph.definition(x)
    if is_call_of(inner, "relax.reshape"):
        return op.reshape(inner.args[0], shape)
    if isinstance(shape, relax.ShapeExpr) and same_shape(shape_of(x), list(shape.values)):
        return x
    return None


def identity_broadcast(call: Any, graph: Any) -> Any:
    """A broadcast to the same shape is none."""
    x, shape = call.args
    if isinstance(shape, relax.ShapeExpr) and same_shape(shape_of(x), list(shape.values)):
        return x
    return None


def full_as_broadcast(call: Any, graph: Any) -> Any:
    """``full`` of a constant is a broadcast (TVM 0.27 cannot legalize it)."""
    if call.op.name == "relax.full":
        shape, value = call.args
    else:
        value = call.args[1]
        extents = shape_of(call.args[0])
        shape = None if extents is None else relax.ShapeExpr(extents)
    if not isinstance(shape, relax.ShapeExpr):
        return None
    dtype = dtype_name(_typed(call).ty)
    if dtype_name(value.ty) != dtype:
        value = graph.emit(op.astype(value, dtype))
    return op.broadcast_to(value, shape)


def single_concat(call: Any, graph: Any) -> Any:
    """A concatenation of one tensor is that tensor."""
    fields = graph.definition(call.args[0])
    if isinstance(fields, relax.Tuple) and len(fields.fields) == 1:
        return fields.fields[0]
    return None


# -- arithmetic -----------------------------------------------------------------------------------


def drop_neutral(call: Any, graph: Any) -> Any:
    """``x * 1``, ``x / 1``, ``x + 0`` and ``x - 0`` are ``x``."""
    left, right = call.args
    neutral = 1.0 if call.op.name in ("relax.multiply", "relax.divide") else 0.0
    wanted = shape_of(_typed(call))
    dtype = dtype_name(_typed(call).ty)
    if (
        scalar(right) == neutral
        and dtype_name(left.ty) == dtype
        and same_shape(shape_of(left), wanted)
    ):
        return left
    commutes = call.op.name in ("relax.multiply", "relax.add")
    if commutes and scalar(left) == neutral and dtype_name(right.ty) == dtype:
        return right if same_shape(shape_of(right), wanted) else None
    return None


def skip_broadcast(call: Any, graph: Any) -> Any:
    """Operators broadcast by themselves, so an operand need not be stored at full size."""
    wanted = shape_of(_typed(call))
    for at, other in ((0, 1), (1, 0)):
        inner = graph.definition(call.args[at])
        if is_call_of(inner, "relax.broadcast_to") and same_shape(
            shape_of(call.args[other]), wanted
        ):
            args = list(call.args)
            args[at] = inner.args[0]
            return relax.Call(call.op, args, call.attrs)
    return None


def broadcast_late(call: Any, graph: Any) -> Any:
    """Arithmetic with a scalar comes before a broadcast, on fewer elements."""
    for at, other in ((0, 1), (1, 0)):
        inner = graph.definition(call.args[at])
        if is_call_of(inner, "relax.broadcast_to") and shape_of(call.args[other]) == []:
            args = list(call.args)
            args[at] = inner.args[0]
            small = graph.emit(relax.Call(call.op, args, call.attrs))
            return op.broadcast_to(small, inner.args[1])
    return None


def power_as_product(call: Any, graph: Any) -> Any:
    """Small constant powers are products, roots or quotients."""
    x, exponent = call.args
    value = scalar(exponent)
    shape = shape_of(x)
    if value is None or shape is None or dtype_name(exponent.ty) != dtype_name(x.ty):
        return None
    if len(shape_of(exponent) or []) > len(shape):
        return None
    if value == 1.0:
        return x
    if value == 2.0:
        return op.multiply(x, x)
    if value == 3.0:
        return op.multiply(graph.emit(op.multiply(x, x)), x)
    if value == 4.0:
        square = graph.emit(op.multiply(x, x))
        return op.multiply(square, square)
    if "float" not in dtype_name(x.ty):
        return None
    if value == 0.5:
        return op.sqrt(x)
    if value == -0.5:
        return op.rsqrt(x)
    if value == -1.0:
        return op.divide(relax.const(1.0, dtype_name(x.ty)), x)
    return None


def compose_casts(call: Any, graph: Any) -> Any:
    """A cast to the same type is none; a cast after a lossless one starts from the source."""
    (x,) = call.args
    dtype = dtype_name(_typed(call).ty)
    if dtype_name(x.ty) == dtype:
        return x
    inner = graph.definition(x)
    if is_call_of(inner, "relax.astype"):
        (source,) = inner.args
        if dtype_name(x.ty) in _WIDER.get(dtype_name(source.ty), ()):
            return source if dtype_name(source.ty) == dtype else op.astype(source, dtype)
    return None


def _typed(call: Any) -> Any:
    if type(call.ty) is tvm.ir.Type:
        return relax.BlockBuilder().normalize(call)
    return call


_Rule = Callable[[Any, Any], Any]
_BROADCASTS: tuple[_Rule, ...] = (skip_broadcast, broadcast_late)

RULES: dict[str, tuple[_Rule, ...]] = {
    "relax.permute_dims": (compose_permutations, permutation_as_reshape),
    "relax.expand_dims": (view_as_reshape,),
    "relax.squeeze": (view_as_reshape,),
    "relax.flatten": (view_as_reshape,),
    "relax.reshape": (compose_reshapes,),
    "relax.broadcast_to": (identity_broadcast,),
    "relax.full": (full_as_broadcast,),
    "relax.full_like": (full_as_broadcast,),
    "relax.concat": (single_concat,),
    "relax.astype": (compose_casts,),
    "relax.add": (drop_neutral, *_BROADCASTS),
    "relax.subtract": (drop_neutral, *_BROADCASTS),
    "relax.multiply": (drop_neutral, *_BROADCASTS),
    "relax.divide": (drop_neutral, *_BROADCASTS),
    "relax.power": (power_as_product, *_BROADCASTS),
    "relax.maximum": _BROADCASTS,
    "relax.minimum": _BROADCASTS,
}
