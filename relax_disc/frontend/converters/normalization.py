"""Batch normalisation by the batch's statistics, in operators that fuse with their neighbours."""

from __future__ import annotations

import functools
import operator
from typing import Any

from tvm import relax, tirx

from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter

op: Any = relax.op


def _count(emitter: Emitter, x: Any) -> tuple[list[int], Any]:
    """Return the axes that are averaged over, and the number of elements of each mean."""
    shape = emitter.shape(x)
    axes = [axis for axis in range(len(shape)) if axis != 1]
    return axes, functools.reduce(operator.mul, [shape[axis] for axis in axes])


def _number(emitter: Emitter, value: Any, dtype: str) -> Any:
    return emitter.tensor(emitter.symbols.analyzer.simplify(value), dtype)


def _by_channel(emitter: Emitter, x: Any, like: Any) -> Any:
    """Lay ``[c]`` along the second axis."""
    ones = [tirx.IntImm("int64", 1)] * (len(emitter.shape(like)) - 2)
    shape = relax.ShapeExpr([tirx.IntImm("int64", 1), emitter.shape(x)[0], *ones])
    return emitter.emit(op.reshape(x, shape))


@converts("relax_disc.batch_norm.default")
def batch_norm(
    emitter: Emitter,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Normalise; also the mean, the inverse deviation and the new running statistics.

    The variance is that of the centred values, in a second pass: a difference of squares would lose
    what a mean far from zero leaves of it.
    """
    emit, dtype = emitter.emit, emitter.dtype(x)
    axes, count = _count(emitter, x)
    wide = count.astype("float64")
    mean = emit(op.mean(x, axes, keepdims=True))
    centred = emit(op.subtract(x, mean))
    total = emit(op.sum(emit(op.multiply(centred, centred)), axes, keepdims=True))
    var = emit(op.divide(total, _number(emitter, wide, dtype)))
    rstd = emit(op.rsqrt(emit(op.add(var, emitter.const(eps, dtype)))))
    out = emit(op.multiply(centred, rstd))
    if weight is not None:
        out = emit(op.multiply(out, _by_channel(emitter, weight, x)))
    if bias is not None:
        out = emit(op.add(out, _by_channel(emitter, bias, x)))
    mean, var, rstd = (emit(op.squeeze(each, axes)) for each in (mean, var, rstd))
    if running_mean is None:
        return out, mean, rstd, mean, var

    def moved(old: Any, new: Any) -> Any:
        parts = [(new, momentum), (old, 1 - momentum)]
        return emit(op.add(*(emit(op.multiply(t, emitter.const(f, dtype))) for t, f in parts)))

    unbiased = emit(op.multiply(var, _number(emitter, wide / (wide - 1.0), dtype)))
    return out, mean, rstd, moved(running_mean, mean), moved(running_var, unbiased)


@converts("relax_disc.batch_norm_backward.default")
def batch_norm_backward(
    emitter: Emitter, grad: Any, x: Any, weight: Any, mean: Any, rstd: Any
) -> tuple[Any, ...]:
    """Gradients of the input, the weight and the bias."""
    emit, dtype = emitter.emit, emitter.dtype(x)
    axes, count = _count(emitter, x)
    share = _number(emitter, 1.0 / count.astype("float64"), dtype)
    along = functools.partial(_by_channel, emitter, like=x)
    centred = emit(op.subtract(x, along(mean)))
    of_bias = emit(op.sum(grad, axes))
    dot = emit(op.sum(emit(op.multiply(grad, centred)), axes))
    slope = emit(op.multiply(emit(op.multiply(dot, share)), emit(op.multiply(rstd, rstd))))
    scale = rstd if weight is None else emit(op.multiply(rstd, weight))
    tilted = emit(op.subtract(grad, emit(op.multiply(centred, along(slope)))))
    moved = emit(op.subtract(tilted, along(emit(op.multiply(of_bias, share)))))
    return emit(op.multiply(moved, along(scale))), emit(op.multiply(dot, rstd)), of_bias
