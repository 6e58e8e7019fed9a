"""Convolutions of any spatial rank, transposed or not, grouped or not, and their gradients.

One group: the windows are laid out as the rows of a matrix, so that forward, input gradient and
weight gradient are each one matrix product, left to the library.  Several groups: direct sums.

A transposed convolution is the input gradient of a convolution, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, te, tirx

from relax_disc.frontend.converters.matrices import product
from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter

op: Any = relax.op


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of a convolution from the inner to the outer side; one entry for each spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def read(self, place: Sequence[Any], tap: Sequence[Any]) -> list[Any]:
        """Position on the inner side that a window's tap reads."""
        each = zip(place, tap, self.stride, self.dilation, self.padding, strict=True)
        return [p * s + k * d - pad for p, k, s, d, pad in each]

    def windows(self, place: Sequence[Any], tap: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Windows on the outer side whose tap reads ``place``, and when there is one."""
        windows, exact = [], []
        each = zip(place, tap, self.stride, self.dilation, self.padding, strict=True)
        for p, k, s, d, pad in each:
            offset = p + pad - k * d
            windows.append(offset if s == 1 else tirx.floordiv(offset, s))
            if s != 1:
                exact.append(tirx.floormod(offset, s) == 0)
        return windows, exact


def _inside(place: Sequence[Any], extents: Sequence[Any]) -> list[Any]:
    return [c for p, n in zip(place, extents, strict=True) for c in (p >= 0, p < n)]


def _guarded(conditions: list[Any], value: Any, dtype: str) -> Any:
    return tirx.if_then_else(tirx.all(*conditions), value, tirx.const(0, dtype))


def _geometry(rank: int, stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    def spread(values: Any) -> tuple[int, ...]:
        values = [int(v) for v in values]
        return tuple(values * rank if len(values) == 1 else values)

    return Geometry(spread(stride), spread(padding), spread(dilation), int(groups))


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
    """Convolution with an optional bias."""
    rank = len(emitter.shape(x)) - 2
    geometry = _geometry(rank, stride, padding, dilation, groups)
    shape = emitter.wanted_shape
    if transposed:
        out = to_inner(emitter, x, weight, geometry, shape)
    else:
        out = to_outer(emitter, x, weight, geometry, shape)
    if bias is not None:
        column = emitter.emit(op.reshape(bias, relax.ShapeExpr([shape[1], *_ones(rank)])))
        out = emitter.emit(op.add(out, column))
    return out


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
    to_input = to_outer if transposed else to_inner
    inner, outer = (grad, x) if transposed else (x, grad)
    dx = to_input(emitter, grad, weight, geometry, emitter.shape(x)) if wanted[0] else None
    dw = None
    if wanted[1]:
        dw = to_weight(emitter, inner, outer, geometry, emitter.shape(weight))
    db = None
    if wanted[2]:
        db = emitter.emit(op.sum(grad, [0, *range(2, rank + 2)]))
    return dx, dw, db


def _ones(count: int) -> list[Any]:
    return [tirx.IntImm("int64", 1)] * count


def _rows(emitter: Emitter, x: Any) -> Any:
    """Lay ``[n, c, *p]`` out as a matrix ``[n * p, c]``."""
    shape = emitter.shape(x)
    rank = len(shape)
    last = emitter.emit(op.permute_dims(x, [0, *range(2, rank), 1]))
    return emitter.emit(
        op.reshape(last, relax.ShapeExpr([_product([shape[0], *shape[2:]]), shape[1]]))
    )


def _product(extents: Sequence[Any]) -> Any:
    result = extents[0]
    for extent in extents[1:]:
        result = result * extent
    return result


def _windows_matrix(
    emitter: Emitter, inner: Any, geometry: Geometry, outer: Sequence[Any], taps: Sequence[Any]
) -> Any:
    """Lay the windows of the inner side out as a matrix ``[n * p, c * k]``."""
    shape = emitter.shape(inner)
    rank = len(taps)

    def compute(a: Any, outer: Any) -> Any:
        def element(*i: Any) -> Any:
            n, place, c, tap = i[0], i[1 : 1 + rank], i[1 + rank], i[2 + rank :]
            read = geometry.read(place, tap)
            return _guarded(_inside(read, a.shape[2:]), a(n, c, *read), a.dtype)

        extents = [a.shape[0], *outer, a.shape[1], *taps]
        return te.compute(extents, element, name="windows")

    windows = emitter.te("windows", compute, inner, relax.ShapeExpr(list(outer)))
    matrix = [_product([shape[0], *outer]), _product([shape[1], *taps])]
    return emitter.emit(op.reshape(windows, relax.ShapeExpr(matrix)))


def to_outer(
    emitter: Emitter, inner: Any, weight: Any, geometry: Geometry, shape: Sequence[Any]
) -> Any:
    """Map the inner side ``[n, c, ...]`` to the outer side ``shape = [n, o, ...]``."""
    taps = emitter.shape(weight)[2:]
    if geometry.groups == 1:
        windows = _windows_matrix(emitter, inner, geometry, shape[2:], taps)
        flat = _flat_weight(emitter, weight)
        made = product(emitter, windows, emitter.emit(op.permute_dims(flat, [1, 0])))
        return _from_rows(emitter, made, shape)

    def compute(a: Any, w: Any, shape: Any) -> Any:
        c = te.reduce_axis((0, w.shape[1]), "c")
        tap = [te.reduce_axis((0, k), f"k{d}") for d, k in enumerate(w.shape[2:])]
        size = tirx.floordiv(w.shape[0], geometry.groups)

        def element(n: Any, o: Any, *place: Any) -> Any:
            read = geometry.read(place, tap)
            channel = tirx.floordiv(o, size) * w.shape[1] + c
            value = a(n, channel, *read) * w(o, c, *tap)
            return te.sum(_guarded(_inside(read, a.shape[2:]), value, a.dtype), axis=[c, *tap])

        return te.compute(shape, element, name="convolution")

    return emitter.te("convolution", compute, inner, weight, relax.ShapeExpr(list(shape)))


def to_inner(
    emitter: Emitter, outer: Any, weight: Any, geometry: Geometry, shape: Sequence[Any]
) -> Any:
    """Map the outer side ``[n, o, ...]`` back to the inner side ``shape = [n, c, ...]``."""
    outer_shape, weight_shape = emitter.shape(outer), emitter.shape(weight)
    taps = weight_shape[2:]
    rank = len(taps)
    if geometry.groups == 1:
        flat = _flat_weight(emitter, weight)
        made = product(emitter, _rows(emitter, outer), flat)
        split = [outer_shape[0], *outer_shape[2:], weight_shape[1], *taps]
        spread = emitter.emit(op.reshape(made, relax.ShapeExpr(split)))

        def gather(a: Any, shape: Any) -> Any:
            tap = [te.reduce_axis((0, k), f"k{d}") for d, k in enumerate(taps)]

            def element(n: Any, c: Any, *place: Any) -> Any:
                windows, exact = geometry.windows(place, tap)
                conditions = exact + _inside(windows, a.shape[1 : 1 + rank])
                return te.sum(_guarded(conditions, a(n, *windows, c, *tap), a.dtype), axis=tap)

            return te.compute(shape, element, name="from_windows")

        return emitter.te("from_windows", gather, spread, relax.ShapeExpr(list(shape)))

    def compute(a: Any, w: Any, shape: Any) -> Any:
        size = tirx.floordiv(w.shape[0], geometry.groups)
        o = te.reduce_axis((0, size), "o")
        tap = [te.reduce_axis((0, k), f"k{d}") for d, k in enumerate(w.shape[2:])]

        def element(n: Any, c: Any, *place: Any) -> Any:
            windows, exact = geometry.windows(place, tap)
            channel = tirx.floordiv(c, w.shape[1]) * size + o
            value = a(n, channel, *windows) * w(channel, tirx.floormod(c, w.shape[1]), *tap)
            conditions = exact + _inside(windows, a.shape[2:])
            return te.sum(_guarded(conditions, value, a.dtype), axis=[o, *tap])

        return te.compute(shape, element, name="convolution_transposed")

    return emitter.te(
        "convolution_transposed", compute, outer, weight, relax.ShapeExpr(list(shape))
    )


def to_weight(
    emitter: Emitter, inner: Any, outer: Any, geometry: Geometry, shape: Sequence[Any]
) -> Any:
    """Gradient of the weight ``shape = [o, c, ...]`` from both sides."""
    taps = list(shape[2:])
    if geometry.groups == 1:
        windows = _windows_matrix(emitter, inner, geometry, emitter.shape(outer)[2:], taps)
        rows = emitter.emit(op.permute_dims(_rows(emitter, outer), [1, 0]))
        made = product(emitter, rows, windows)
        return emitter.emit(op.reshape(made, relax.ShapeExpr(list(shape))))

    def compute(a: Any, g: Any, shape: Any) -> Any:
        n = te.reduce_axis((0, g.shape[0]), "n")
        place = [te.reduce_axis((0, p), f"p{d}") for d, p in enumerate(g.shape[2:])]
        size = tirx.floordiv(shape[0], geometry.groups)

        def element(o: Any, c: Any, *tap: Any) -> Any:
            read = geometry.read(place, tap)
            channel = tirx.floordiv(o, size) * shape[1] + c
            value = g(n, o, *place) * a(n, channel, *read)
            return te.sum(_guarded(_inside(read, a.shape[2:]), value, a.dtype), axis=[n, *place])

        return te.compute(shape, element, name="convolution_weight")

    return emitter.te("convolution_weight", compute, inner, outer, relax.ShapeExpr(list(shape)))


def _flat_weight(emitter: Emitter, weight: Any) -> Any:
    shape = emitter.shape(weight)
    return emitter.emit(op.reshape(weight, relax.ShapeExpr([shape[0], _product(shape[1:])])))


def _from_rows(emitter: Emitter, rows: Any, shape: Sequence[Any]) -> Any:
    """Lay a matrix ``[n * p, o]`` out as ``shape = [n, o, *p]``."""
    rank = len(shape)
    split = emitter.emit(op.reshape(rows, relax.ShapeExpr([shape[0], *shape[2:], shape[1]])))
    return emitter.emit(op.permute_dims(split, [0, rank - 1, *range(1, rank - 1)]))
