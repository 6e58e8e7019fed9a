"""Sums, means, extrema and softmax."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from tvm import relax, tirx

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


def _extreme(
    emitter: Emitter, build: Callable[..., Any], x: Any, axes: Any, keepdim: bool, dtype: str
) -> Any:
    """Reduce to an extremum."""
    return _reduce(emitter, functools.partial(extremum, emitter, build), x, axes, keepdim, dtype)


def extremum(
    emitter: Emitter, build: Callable[..., Any], x: Any, axes: Any, keepdims: bool = False
) -> Any:
    """Greatest or least element; NaN wins, which TVM's own reductions lose."""
    found = build(x, axes, keepdims)
    if "float" not in emitter.dtype(x):
        return found
    nowhere = emitter.cast(emitter.emit(op.isnan(x)), "int8")
    lost = emitter.cast(emitter.emit(op.max(nowhere, axes, keepdims)), "bool")
    nan = emitter.const(math.nan, emitter.dtype(x))
    return op.where(lost, nan, emitter.emit(found))


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


@converts("aten.amax.default")
def amax(emitter: Emitter, x: Any, axes: Any = (), keepdim: bool = False) -> Any:
    """Greatest element."""
    return _extreme(emitter, op.max, x, axes, keepdim, emitter.wanted_dtype)


@converts("aten.amin.default")
def amin(emitter: Emitter, x: Any, axes: Any = (), keepdim: bool = False) -> Any:
    """Least element."""
    return _extreme(emitter, op.min, x, axes, keepdim, emitter.wanted_dtype)


@converts("aten.max.default")
def max_all(emitter: Emitter, x: Any) -> Any:
    """Greatest of all elements."""
    return _extreme(emitter, op.max, x, None, False, emitter.wanted_dtype)


@converts("aten.min.default")
def min_all(emitter: Emitter, x: Any) -> Any:
    """Least of all elements."""
    return _extreme(emitter, op.min, x, None, False, emitter.wanted_dtype)


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
    x = emitter.cast(emitter.tensor(x, "bool"), "int8")
    return emitter.cast(emitter.emit(op.max(x, axes_of(emitter, x, axes), keepdim)), "bool")


@converts("aten.var.correction", "aten.var_mean.correction")
def variance(
    emitter: Emitter, x: Any, axes: Any = None, correction: Any = 1, keepdim: bool = False
) -> Any:
    """Variance in two passes."""
    axes = axes_of(emitter, x, axes)
    dtype = emitter.dtype(x)
    wide = WIDE.get(dtype, dtype)
    x = emitter.cast(x, wide)
    shape = emitter.shape(x)
    count = functools.reduce(operator.mul, [shape[a] for a in axes], tirx.IntImm("int64", 1))
    mean = emitter.emit(op.mean(x, axes, keepdims=True))
    centred = emitter.emit(op.subtract(x, mean))
    total = emitter.emit(op.sum(emitter.emit(op.multiply(centred, centred)), axes, keepdim))
    correction = 1 if correction is None else correction
    divisor = emitter.symbols.analyzer.simplify(
        count.astype("float64") - tirx.const(float(correction), "float64")
    )
    var = emitter.emit(op.divide(total, emitter.tensor(divisor, wide)))
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


@converts("aten.argmax.default", "aten.argmin.default")
def argument(emitter: Emitter, x: Any, axis: Any = None, keepdim: bool = False) -> Any:
    """Position of the greatest or least element, the first of equals."""
    build = op.argmax if "argmax" in str(emitter.node.target) else op.argmin
    if axis is None and keepdim:
        raise emitter.refuse("keepdim without an axis")
    return first_position(emitter, emitter.emit(build(x, axis, keepdim)))


def first_position(emitter: Emitter, place: Any) -> Any:
    """Turn TVM's -1, for an axis of NaN or of infinities, into the first position."""
    return emitter.cast(
        emitter.emit(op.maximum(place, emitter.const(0, emitter.dtype(place)))), "int64"
    )
