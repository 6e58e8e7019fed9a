"""Convolutions and their gradients: what the library computes with channels last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from relax_disc import ops
from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter
from relax_disc.ops.convolution import Geometry

op: Any = relax.op


def _geometry(rank: int, stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    def spread(values: Any) -> tuple[int, ...]:
        values = [int(v) for v in values]
        return tuple(values * rank if len(values) == 1 else values)

    return Geometry(spread(stride), spread(padding), spread(dilation), int(groups))


def _stored(shape: Sequence[Any]) -> list[Any]:
    return [shape[0], *shape[2:], shape[1]]


@converts("aten.convolution.default")
def convolution(
    emitter: Emitter,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    """Convolution with an optional bias; output padding is in the result's shape."""
    rank = len(emitter.shape(x)) - 2
    geometry = _geometry(rank, stride, padding, dilation, groups)
    shape = _stored(emitter.wanted_shape)
    last = emitter.channels_last(x)
    if not transposed:
        return emitter.channels_first(
            emitter.emit(ops.convolution(last, weight, bias, shape, geometry))
        )
    out = emitter.emit(ops.convolution_input(last, weight, shape, geometry))
    return emitter.channels_first(out if bias is None else emitter.emit(op.add(out, bias)))


@converts("aten.convolution_backward.default")
def convolution_backward(
    emitter: Emitter,
    grad: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Any,
) -> Any:
    """Gradients of a convolution by input, weight and bias; those not wanted are ``None``."""
    rank = len(emitter.shape(x)) - 2
    geometry = _geometry(rank, stride, padding, dilation, groups)
    last = emitter.channels_last(grad)
    dx = dw = db = None
    if wanted[0]:
        shape = _stored(emitter.shape(x))
        if transposed:
            found = ops.convolution(last, weight, None, shape, geometry)
        else:
            found = ops.convolution_input(last, weight, shape, geometry)
        dx = emitter.channels_first(emitter.emit(found))
    if wanted[1]:
        inner = emitter.channels_last(x)
        sides = (inner, last) if transposed else (last, inner)
        dw = emitter.emit(ops.convolution_weight(*sides, emitter.shape(weight), geometry))
    if wanted[2]:
        db = emitter.emit(op.sum(last, list(range(rank + 1))))
    return dx, dw, db
