"""Sums, means, extrema and softmax."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx

from relax_disc.frontend.converters.registry import WIDE, axes_of, axis_of, converts
from relax_disc.frontend.emitter import Emitter

op: Any = relax.op


def _reduce(
    emitter: Emitter, build: Callable[..., Any], x: Any, axes: Any, keepdim: bool, dtype: str
) -> Any:
    """Reduce in ``dtype`` (sums of short floats in float32) and convert to the wanted type."""
    x = emitter.cast(x, WIDE.get(dtype, dtype))
    if len(emitter.shape(x)) > 0:
        x = emitter.emit(build(x, axes_of(emitter, x, axes), keepdims=keepdim))
    return emitter.cast(x, emitter.wanted_dtype)


@converts("aten.sum.dim_IntList")
def sum_(
    emitter: Emitter, x: Any, axes: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    """Sum."""
    return _reduce(emitter, op.sum, x, axes, keepdim, emitter.wanted_dtype)


@converts("aten.mean.dim", "aten.mean.default")
def mean(
    emitter: Emitter, x: Any, axes: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    """Mean."""
    return _reduce(emitter, op.mean, x, axes, keepdim, emitter.wanted_dtype)


@converts("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extremum(emitter: Emitter, x: Any, axes: Any = None, keepdim: bool = False) -> Any:
    """Greatest or least element; NaN wins, which TVM's own reductions lose."""
    is_max = "max" in str(emitter.node.target)
    # Of truths TVM knows no least and no greatest value.
    dtype = "uint8" if emitter.dtype(x) == "bool" else emitter.dtype(x)
    build = functools.partial(_extremum, emitter, is_max)
    return _reduce(emitter, build, x, axes, keepdim, dtype)


def _extremum(emitter: Emitter, is_max: bool, x: Any, axes: Any, keepdims: bool) -> Any:
    if "float" not in emitter.dtype(x):
        return (op.max if is_max else op.min)(x, axes, keepdims)
    # TVM's own begin with the greatest finite number: a row of infinities would be taken for it.
    start, combine = (-math.inf, tirx.max) if is_max else (math.inf, tirx.min)
    reducer = te.comm_reducer(
        lambda a, b: combine(a, b), lambda dtype: tirx.const(start, dtype), "extremum"
    )

    def compute(x: Any) -> Any:
        reduced = {a: te.reduce_axis((0, x.shape[a]), f"k{a}") for a in axes}
        kept = [a for a in range(len(x.shape)) if a not in reduced]

        def element(*i: Any) -> Any:
            place = dict(enumerate(i)) if keepdims else dict(zip(kept, i, strict=True))
            return reducer(
                x(*({**place, **reduced}[a] for a in range(len(x.shape)))), [*reduced.values()]
            )

        shape = [1 if a in reduced else n for a, n in enumerate(x.shape) if keepdims or a in kept]
        return te.compute(shape, element, name="extremum")

    found = emitter.te("extremum", compute, x)
    is_nan = emitter.cast(emitter.emit(op.isnan(x)), "uint8")  # of which none is the least
    lost = emitter.cast(emitter.emit(op.max(is_nan, axes, keepdims)), "bool")
    return op.where(lost, emitter.const(math.nan, emitter.dtype(x)), found)


@converts("aten.prod.dim_int", "aten.prod.default")
def prod(
    emitter: Emitter, x: Any, axis: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    """Product."""
    axis = None if "default" in str(emitter.node.target) else axis
    return _reduce(emitter, op.prod, x, axis, keepdim, emitter.wanted_dtype)


@converts("aten.any.default", "aten.any.dim", "aten.any.dims")
def any_(emitter: Emitter, x: Any, axes: Any = None, keepdim: bool = False) -> Any:
    """Say whether any element is true."""
    x = emitter.cast(emitter.tensor(x, "bool"), "uint8")  # the greatest of none is 0
    return emitter.cast(emitter.emit(op.max(x, axes_of(emitter, x, axes), keepdim)), "bool")


@converts("aten.var.correction", "aten.var_mean.correction")
def variance(
    emitter: Emitter, x: Any, axes: Any = None, correction: Any = 1, keepdim: bool = False
) -> Any:
    """Variance in two passes; not finite for no more elements than the correction."""
    axes = axes_of(emitter, x, axes)
    dtype = emitter.dtype(x)
    wide = WIDE.get(dtype, dtype)
    x = emitter.cast(x, wide)
    shape = emitter.shape(x)
    count = functools.reduce(operator.mul, [shape[a] for a in axes], tirx.IntImm("int64", 1))
    mean = emitter.emit(op.mean(x, axes, keepdims=True))
    centred = emitter.emit(op.subtract(x, mean))
    total = emitter.emit(op.sum(emitter.emit(op.multiply(centred, centred)), axes, keepdim))
    correction = 1.0 if correction is None else float(correction)
    kind = "int64" if correction.is_integer() else "float64"
    left = count.astype(kind) - tirx.const(correction, kind)
    divisor = emitter.symbols.analyzer.simplify(tirx.max(left, tirx.const(0, kind)))
    var = emitter.emit(op.divide(total, emitter.tensor(divisor.astype("float64"), wide)))
    name = str(emitter.node.target)
    var = emitter.cast(var, dtype)
    if "var_mean" not in name:
        return var
    if not keepdim:
        mean = emitter.emit(op.squeeze(mean, axes))
    return var, emitter.cast(mean, dtype)


@converts("aten._softmax.default")
def softmax(emitter: Emitter, x: Any, axis: int, half_to_float: Any = False) -> Any:
    """Softmax along one axis."""
    dtype = emitter.wanted_dtype
    x = emitter.cast(x, WIDE.get(dtype, dtype))
    axis = axis_of(emitter, x, axis)
    return emitter.cast(emitter.emit(op.nn.softmax(x, axis)), dtype)


@converts("aten._log_softmax.default")
def log_softmax(emitter: Emitter, x: Any, axis: int, half_to_float: bool = False) -> Any:
    """Logarithm of the softmax."""
    dtype = emitter.wanted_dtype
    x = emitter.cast(x, WIDE.get(dtype, dtype))
    axis = axis_of(emitter, x, axis)
    shifted = emitter.emit(op.subtract(x, emitter.emit(op.max(x, [axis], keepdims=True))))
    total = emitter.emit(op.sum(emitter.emit(op.exp(shifted)), [axis], keepdims=True))
    return emitter.cast(emitter.emit(op.subtract(shifted, emitter.emit(op.log(total)))), dtype)
