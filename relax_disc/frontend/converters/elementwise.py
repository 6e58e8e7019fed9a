"""Operators on single elements, with PyTorch's rules for mixed types.

Operands are converted to the type in which PyTorch computes (float32 for bfloat16 and float16)
and the result to the type that PyTorch returns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes
from torch.utils._pytree import tree_map_only
from tvm import relax, te, tirx

from relax_disc.frontend.converters.registry import TABLE, converts
from relax_disc.frontend.emitter import Emitter, dtype_name

op: Any = relax.op


def compute_dtype(emitter: Emitter, kind: KIND, *operands: Any) -> str:
    """Name the type in which PyTorch computes an element-wise operator on these fx operands."""
    values = tree_map_only(torch.fx.Node, emitter.value, operands)
    numbers = tree_map_only(torch.SymInt, lambda _: 2, values)
    numbers = tree_map_only(torch.SymFloat, lambda _: 0.5, numbers)
    computed, _ = elementwise_dtypes(*numbers, type_promotion_kind=kind)
    return dtype_name(computed)


def apply(
    emitter: Emitter, kind: KIND, build: Callable[..., Any], operands: tuple[Any, ...]
) -> Any:
    """Convert the operands, apply ``build``, convert the result."""
    traced = emitter.node.args[: len(operands)]
    dtype = compute_dtype(emitter, kind, *traced)
    if kind is KIND.ALWAYS_BOOL and dtype == "bool":
        dtype = "int8"  # TVM's LLVM compares truths as floats, which it refuses
    tensors = [emitter.tensor(x, dtype) for x in operands]
    return emitter.cast(emitter.emit(build(*tensors)), emitter.wanted_dtype)


def _simple(kind: KIND, build: Callable[..., Any]) -> Callable[..., Any]:
    def convert(emitter: Emitter, *operands: Any) -> Any:
        return apply(emitter, kind, build, operands)

    return convert


_UNARY_SAME: dict[str, Callable[..., Any]] = {
    "neg": op.negative,
    "sign": op.sign,
    "floor": op.floor,
    "ceil": op.ceil,
    "round": op.round,
    "trunc": op.trunc,
}
_UNARY_FLOAT: dict[str, Callable[..., Any]] = {
    "exp": op.exp,
    "log": op.log,
    "sqrt": op.sqrt,
    "rsqrt": op.rsqrt,
    "sin": op.sin,
    "cos": op.cos,
    "tan": op.tan,
    "tanh": op.tanh,
    "sigmoid": op.sigmoid,
    "erf": op.erf,
    "sinh": op.sinh,
    "cosh": op.cosh,
    "asin": op.asin,
    "acos": op.acos,
    "atan": op.atan,
    "asinh": op.asinh,
    "acosh": op.acosh,
    "atanh": op.atanh,
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "lt": op.less,
    "le": op.less_equal,
    "gt": op.greater,
    "ge": op.greater_equal,
}

for _name, _build in _UNARY_SAME.items():
    TABLE[f"aten.{_name}.default"] = _simple(KIND.DEFAULT, _build)
for _name, _build in _UNARY_FLOAT.items():
    TABLE[f"aten.{_name}.default"] = _simple(KIND.INT_TO_FLOAT, _build)
for _name, _build in _COMPARISONS.items():
    for _overload in ("Tensor", "Scalar"):
        TABLE[f"aten.{_name}.{_overload}"] = _simple(KIND.ALWAYS_BOOL, _build)


def _bits(emitter: Emitter, build: Callable[..., Any], *operands: Any) -> Any:
    """Logic of truth values, as bits: TVM would take ``not (a < b)`` for ``a >= b``."""
    bits = [emitter.cast(emitter.tensor(x, "bool"), "int8") for x in operands]
    return emitter.cast(emitter.emit(build(*bits)), "bool")


def _not(emitter: Emitter, x: Any) -> Any:
    return _bits(emitter, lambda a: op.bitwise_xor(a, emitter.const(1, "int8")), x)


@converts("aten.eq.Tensor", "aten.eq.Scalar", "aten.ne.Tensor", "aten.ne.Scalar")
def equality(emitter: Emitter, x: Any, y: Any) -> Any:
    """Equality; NaN equals nothing, itself neither."""
    wants_equal = ".eq." in str(emitter.node.target)
    if x is y and "float" in emitter.dtype(x):
        unequal = emitter.emit(op.isnan(x))
        return _not(emitter, unequal) if wants_equal else unequal
    if wants_equal:
        return apply(emitter, KIND.ALWAYS_BOOL, op.equal, (x, y))
    if "float" not in compute_dtype(emitter, KIND.ALWAYS_BOOL, *emitter.node.args[:2]):
        return apply(emitter, KIND.ALWAYS_BOOL, op.not_equal, (x, y))
    return _not(emitter, apply(emitter, KIND.ALWAYS_BOOL, op.equal, (x, y)))


def _times_zero(emitter: Emitter, x: Any) -> Any:
    """``x * 0``, which TVM takes for 0: NaN where ``x`` is not finite."""
    nan, zero = (emitter.const(value, emitter.dtype(x)) for value in (math.nan, 0.0))
    return op.where(emitter.emit(op.isfinite(x)), zero, nan)


@converts("aten.mul.Tensor", "aten.mul.Scalar")
def mul(emitter: Emitter, x: Any, y: Any) -> Any:
    """Product; PyTorch's decompositions multiply by 1 a lot."""
    if isinstance(y, int | float) and y == 1 and emitter.dtype(x) == emitter.wanted_dtype:
        return x
    if emitter.wanted_dtype == "bool":
        return _bits(emitter, op.bitwise_and, x, y)
    if isinstance(y, int | float) and y == 0 and "float" in emitter.wanted_dtype:
        return apply(emitter, KIND.DEFAULT, lambda a, _: _times_zero(emitter, a), (x, y))
    return apply(emitter, KIND.DEFAULT, op.multiply, (x, y))


@converts("aten.add.Tensor", "aten.add.Scalar")
def add(emitter: Emitter, x: Any, y: Any, alpha: Any = 1) -> Any:
    """``x + alpha * y``; of truths, whether one of them holds."""
    if emitter.wanted_dtype == "bool":
        return _bits(emitter, op.bitwise_or, x, y if alpha else False)
    return _scaled(emitter, op.add, x, y, alpha)


@converts("aten.sub.Tensor", "aten.sub.Scalar")
def sub(emitter: Emitter, x: Any, y: Any, alpha: Any = 1) -> Any:
    """``x - alpha * y``."""
    if x is y and alpha == 1 and "float" in emitter.wanted_dtype:
        return emitter.emit(_times_zero(emitter, x))
    return _scaled(emitter, op.subtract, x, y, alpha)


def _scaled(
    emitter: Emitter, build: Any, x: Any, y: Any, alpha: Any, scale_first: bool = False
) -> Any:
    dtype = compute_dtype(emitter, KIND.DEFAULT, *emitter.node.args[:2])
    operands = [emitter.tensor(x, dtype), emitter.tensor(y, dtype)]
    if alpha != 1:
        which = 0 if scale_first else 1
        factor = emitter.tensor(alpha, dtype)
        operands[which] = emitter.emit(op.multiply(operands[which], factor))
    return emitter.cast(emitter.emit(build(*operands)), emitter.wanted_dtype)


@converts("aten.div.Tensor", "aten.div.Scalar")
def div(emitter: Emitter, x: Any, y: Any) -> Any:
    """True division."""
    if isinstance(y, int | float) and y == 0:  # TVM refuses to divide by a constant zero
        return apply(
            emitter, KIND.INT_TO_FLOAT, lambda a, _: op.multiply(a, _like(a, "inf")), (x, y)
        )
    return apply(emitter, KIND.INT_TO_FLOAT, op.divide, (x, y))


@converts("aten.pow.Tensor_Tensor", "aten.pow.Scalar", "aten.pow.Tensor_Scalar")
def power(emitter: Emitter, x: Any, y: Any) -> Any:
    """Power; small whole exponents and halves become products and roots, as in PyTorch."""
    dtype = compute_dtype(emitter, KIND.BOOL_TO_LONG, *emitter.node.args[:2])
    exponent = y if isinstance(y, int | float) and not isinstance(y, bool) else None
    if exponent is not None and (special := _POWERS.get(float(exponent))) is not None:
        base = emitter.tensor(x, dtype)
        if "float" in dtype or exponent >= 0:
            return emitter.cast(special(emitter, base), emitter.wanted_dtype)
    return apply(emitter, KIND.BOOL_TO_LONG, op.power, (x, y))


def _one(emitter: Emitter, base: Any) -> Any:
    return emitter.const(1, emitter.dtype(base))


_POWERS: dict[float, Callable[[Emitter, Any], Any]] = {
    0.0: lambda e, x: e.emit(op.broadcast_to(_one(e, x), relax.ShapeExpr(e.shape(x)))),
    1.0: lambda e, x: x,
    2.0: lambda e, x: e.emit(op.multiply(x, x)),
    3.0: lambda e, x: e.emit(op.multiply(e.emit(op.multiply(x, x)), x)),
    0.5: lambda e, x: e.emit(op.sqrt(x)),
    -0.5: lambda e, x: e.emit(op.rsqrt(x)),
    -1.0: lambda e, x: e.emit(op.divide(_one(e, x), x)),
    -2.0: lambda e, x: e.emit(op.divide(_one(e, x), e.emit(op.multiply(x, x)))),
}


@converts("aten.reciprocal.default")
def reciprocal(emitter: Emitter, x: Any) -> Any:
    """``1 / x``."""
    return apply(emitter, KIND.INT_TO_FLOAT, lambda a: op.divide(_one(emitter, a), a), (x,))


@converts("aten.abs.default")
def absolute(emitter: Emitter, x: Any) -> Any:
    """Absolute value."""
    return apply(emitter, KIND.DEFAULT, op.abs, (x,))


@converts(
    "aten.log1p.default",
    "aten.expm1.default",
    "aten.log2.default",
    "aten.log10.default",
    "aten.exp2.default",
)
def elementary(emitter: Emitter, x: Any) -> Any:
    """Functions that Relax does not have, through TVM's intrinsics."""
    name = str(emitter.node.target).split(".")[1]
    function = {
        "log1p": tirx.log1p,
        "expm1": _expm1,
        "log2": tirx.log2,
        "log10": tirx.log10,
        "exp2": tirx.exp2,
    }[name]
    dtype = compute_dtype(emitter, KIND.INT_TO_FLOAT, *emitter.node.args[:1])
    result = emitter.te(
        name,
        lambda a: te.compute(a.shape, lambda *i: function(a(*i)), name=name),
        emitter.tensor(x, dtype),
    )
    return emitter.cast(result, emitter.wanted_dtype)


def _expm1(x: Any) -> Any:
    """``exp(x) - 1`` without cancellation: Kahan's ``(u - 1) * (x / log(u))``, ``u = exp(x)``."""
    one = tirx.const(1, x.ty.dtype)
    u = tirx.exp(x)
    inner = tirx.Select(u - one == -one, -one, (u - one) * (x / tirx.log(u)))
    finite = tirx.Select(tirx.isinf(u), u, inner)
    return tirx.Select(u == one, x, finite)


def _like(x: Any, value: Any) -> Any:
    return relax.const(float(value), x.ty.dtype.dtype)


@converts("aten.maximum.default", "aten.minimum.default")
def extremum(emitter: Emitter, x: Any, y: Any) -> Any:
    """Greater or lesser of two; NaN wins.  TVM's keeps only the NaN of the second operand."""
    is_greater = "maximum" in str(emitter.node.target)
    if emitter.wanted_dtype == "bool":
        truth = op.logical_or if is_greater else op.logical_and
        return apply(emitter, KIND.DEFAULT, truth, (x, y))
    build = op.maximum if is_greater else op.minimum
    return apply(emitter, KIND.DEFAULT, functools.partial(_bound, emitter, build), (x, y))


def _bound(emitter: Emitter, build: Callable[..., Any], bound: Any, x: Any) -> Any:
    if "float" not in emitter.dtype(x):
        return build(bound, x)
    return op.where(emitter.emit(op.isnan(bound)), bound, emitter.emit(build(bound, x)))


@converts("aten.relu.default")
def relu(emitter: Emitter, x: Any) -> Any:
    """ReLU; NaN stays NaN."""
    return apply(emitter, KIND.DEFAULT, lambda a: op.maximum(_zero(a), a), (x,))


def _zero(x: Any) -> Any:
    return relax.const(0, x.ty.dtype.dtype)


@converts("aten.elu.default")
def elu(emitter: Emitter, x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    """``scale * (x if x > 0 else alpha * (exp(input_scale * x) - 1))``."""

    def build(a: Any) -> Any:
        dtype = emitter.dtype(a)
        const = [emitter.const(v, dtype) for v in (alpha, scale, input_scale, 1.0)]
        powered = emitter.emit(op.exp(emitter.emit(op.multiply(a, const[2]))))
        below = emitter.emit(op.multiply(emitter.emit(op.subtract(powered, const[3])), const[0]))
        positive = emitter.emit(op.greater(a, _zero(a)))
        return op.multiply(emitter.emit(op.where(positive, a, below)), const[1])

    return apply(emitter, KIND.DEFAULT, build, (x,))


@converts("aten.clamp.default", "aten.clamp.Tensor")
def clamp(emitter: Emitter, x: Any, low: Any = None, high: Any = None) -> Any:
    """Bounds; NaN wins."""
    dtype = emitter.wanted_dtype
    result = emitter.tensor(x, dtype)
    for bound, build in ((low, op.maximum), (high, op.minimum)):
        if bound is None:
            continue
        end = emitter.tensor(bound, dtype)
        is_number = isinstance(bound, int | float) and bound == bound
        limited = build(end, result) if is_number else _bound(emitter, build, end, result)
        result = emitter.emit(limited)
    return result


@converts("aten.where.self")
def where(emitter: Emitter, condition: Any, x: Any, y: Any) -> Any:
    """Choice between two tensors."""
    dtype = emitter.wanted_dtype
    condition = emitter.tensor(condition, "bool")
    return emitter.emit(op.where(condition, emitter.tensor(x, dtype), emitter.tensor(y, dtype)))


@converts("aten.logical_not.default", "aten.bitwise_not.default")
def logical_not(emitter: Emitter, x: Any) -> Any:
    """Negation of bool tensors, bit complement of integers."""
    if emitter.dtype(x) == "bool" or "logical" in str(emitter.node.target):
        return _not(emitter, x)
    return emitter.emit(op.bitwise_not(x))


_BITWISE = {"and": op.bitwise_and, "or": op.bitwise_or, "xor": op.bitwise_xor}


@converts("aten.logical_and.default", "aten.logical_or.default", "aten.logical_xor.default")
def logical(emitter: Emitter, x: Any, y: Any) -> Any:
    """Logic of truth values."""
    name = str(emitter.node.target).split(".")[1].removeprefix("logical_")
    return _bits(emitter, _BITWISE[name], x, y)


@converts(
    "aten.bitwise_and.Tensor",
    "aten.bitwise_and.Scalar",
    "aten.bitwise_or.Tensor",
    "aten.bitwise_or.Scalar",
    "aten.bitwise_xor.Tensor",
    "aten.bitwise_xor.Scalar",
)
def bitwise(emitter: Emitter, x: Any, y: Any) -> Any:
    """Logic of bits; of bool tensors, logic."""
    name = str(emitter.node.target).split(".")[1].removeprefix("bitwise_")
    if emitter.wanted_dtype == "bool":
        return _bits(emitter, _BITWISE[name], x, y)
    return apply(emitter, KIND.DEFAULT, _BITWISE[name], (x, y))


@converts("aten.isnan.default", "aten.isinf.default")
def classify(emitter: Emitter, x: Any) -> Any:
    """Tests for NaN and infinities."""
    if "float" not in emitter.dtype(x):
        false = emitter.const(False, "bool")
        return emitter.emit(op.broadcast_to(false, relax.ShapeExpr(emitter.wanted_shape)))
    build = op.isnan if "isnan" in str(emitter.node.target) else op.isinf
    return emitter.emit(build(x))


@converts("aten.atan2.default")
def atan2(emitter: Emitter, x: Any, y: Any) -> Any:
    """Angle of a point."""
    return apply(emitter, KIND.INT_TO_FLOAT, op.atan2, (x, y))


@converts("aten._to_copy.default", "prims.convert_element_type.default")
def to_copy(emitter: Emitter, x: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    """Convert the element type; a float becomes an integer by cutting off."""
    return emitter.cast(x, emitter.wanted_dtype)


@converts("aten.clone.default", "aten.alias.default", "aten.lift_fresh_copy.default")
def identity(emitter: Emitter, x: Any, **layout: Any) -> Any:
    """Copies: values here never change, so that a copy is the tensor itself."""
    return x
