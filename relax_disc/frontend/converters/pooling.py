"""Pooling over one, two or three spatial axes, and its gradients.

Gradients gather: an element of the input sums over the windows that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, te, tirx

from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter

op: Any = relax.op


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of windows over the inner side; one entry for each spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

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


def _geometry(
    kernel: Any, stride: Any, padding: Any, dilation: Any = (1,)
) -> tuple[Geometry, list]:
    taps = [int(k) for k in kernel]

    def spread(values: Any) -> tuple[int, ...]:
        values = [int(v) for v in values]
        return tuple(values * len(taps) if len(values) == 1 else values)

    stride = spread(stride) if stride else tuple(taps)
    return Geometry(stride, spread(padding), spread(dilation)), spread(taps)  # pyright: ignore


def _taps(kernel: Sequence[int]) -> list[Any]:
    return [te.reduce_axis((0, tirx.IntImm("int64", k)), f"k{d}") for d, k in enumerate(kernel)]


def _inside(place: Sequence[Any], extents: Sequence[Any]) -> list[Any]:
    return [c for p, n in zip(place, extents, strict=True) for c in (p >= 0, p < n)]


def _flat(place: Sequence[Any], extents: Sequence[Any]) -> Any:
    result = place[0]
    for p, n in zip(place[1:], extents[1:], strict=True):
        result = result * n + p
    return result


@converts("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool(
    emitter: Emitter,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    dilation: Any = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Greatest element of each window, and its flat position in the plane, the first of equals."""
    geometry, kernel = _geometry(kernel, stride, padding, dilation)
    shape = emitter.symbols.shape(emitter.wanted[0].shape)
    lead = len(shape) - len(kernel)

    def greatest(a: Any, shape: Any) -> Any:
        tap = _taps(kernel)

        def element(*i: Any) -> Any:
            read = geometry.read(i[lead:], tap)
            value = tirx.if_then_else(
                tirx.all(*_inside(read, a.shape[lead:])),
                a(*i[:lead], *read),
                tirx.min_value(a.dtype),
            )
            return te.max(value, axis=tap)

        return te.compute(shape, element, name="max_pool")

    def position(a: Any, top: Any) -> Any:
        tap = _taps(kernel)
        none = tirx.const(2**62, "int64")

        def element(*i: Any) -> Any:
            read = geometry.read(i[lead:], tap)
            inside = _inside(read, a.shape[lead:])
            hit = tirx.if_then_else(tirx.all(*inside), a(*i[:lead], *read) == top(*i), False)
            return te.min(tirx.Select(hit, _flat(read, a.shape[lead:]), none), axis=tap)

        return te.compute(top.shape, element, name="max_pool_position")

    top = emitter.te("max_pool", greatest, x, relax.ShapeExpr(shape))
    return top, emitter.te("max_pool_position", position, x, top)


@converts(
    "aten.max_pool2d_with_indices_backward.default",
    "aten.max_pool3d_with_indices_backward.default",
)
def max_pool_backward(
    emitter: Emitter,
    grad: Any,
    x: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """Gradient of max pooling from the remembered positions."""
    geometry, kernel = _geometry(kernel, stride, padding, dilation)
    lead = len(emitter.wanted.shape) - len(kernel)

    def compute(g: Any, indices: Any, shape: Any) -> Any:
        tap = _taps(kernel)

        def element(*i: Any) -> Any:
            windows, exact = geometry.windows(i[lead:], tap)
            there = tirx.all(*exact, *_inside(windows, g.shape[lead:]))
            at = [*i[:lead], *windows]
            here = _flat(i[lead:], shape[lead:])
            chosen = tirx.if_then_else(there, indices(*at) == here, False)
            value = tirx.if_then_else(chosen, g(*at), tirx.const(0, g.dtype))
            return te.sum(value, axis=tap)

        return te.compute(shape, element, name="max_pool_backward")

    shape = relax.ShapeExpr(emitter.wanted_shape)
    return emitter.te("max_pool_backward", compute, grad, indices, shape)


def _divisor(
    geometry: Geometry,
    kernel: Sequence[int],
    window: Sequence[Any],
    extents: Sequence[Any],
    include_padding: bool,
    override: Any,
    dtype: str,
) -> Any:
    """Count the elements that PyTorch divides a window's sum by."""
    if override is not None:
        return tirx.const(int(override), dtype)
    count: Any = tirx.IntImm("int64", 1)
    each = zip(window, kernel, geometry.stride, geometry.padding, extents, strict=True)
    for p, k, s, pad, n in each:
        start = p * s - pad
        end = tirx.min(start + k, n + pad)
        if not include_padding:
            start, end = tirx.max(start, 0), tirx.min(end, n)
        count = count * (end - start)
    return count.astype(dtype)


@converts("aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(
    emitter: Emitter,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Any:
    """Mean of each window."""
    geometry, kernel = _geometry(kernel, stride, padding)
    lead = len(emitter.wanted.shape) - len(kernel)

    def total(a: Any, shape: Any) -> Any:
        tap = _taps(kernel)

        def element(*i: Any) -> Any:
            read = geometry.read(i[lead:], tap)
            inside = tirx.all(*_inside(read, a.shape[lead:]))
            value = tirx.if_then_else(inside, a(*i[:lead], *read), tirx.const(0, a.dtype))
            return te.sum(value, axis=tap)

        summed = te.compute(shape, element, name="pool_sum")

        def mean(*i: Any) -> Any:
            divisor = _divisor(
                geometry,
                kernel,
                i[lead:],
                a.shape[lead:],
                count_include_pad,
                divisor_override,
                a.dtype,
            )
            return summed(*i) / divisor

        return te.compute(shape, mean, name="avg_pool")

    return emitter.te("avg_pool", total, x, relax.ShapeExpr(emitter.wanted_shape))


@converts("aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default")
def avg_pool_backward(
    emitter: Emitter,
    grad: Any,
    x: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: Any,
) -> Any:
    """Gradient of average pooling."""
    geometry, kernel = _geometry(kernel, stride, padding)
    lead = len(emitter.wanted.shape) - len(kernel)

    def compute(g: Any, shape: Any) -> Any:
        tap = _taps(kernel)

        def element(*i: Any) -> Any:
            windows, exact = geometry.windows(i[lead:], tap)
            there = tirx.all(*exact, *_inside(windows, g.shape[lead:]))
            divisor = _divisor(
                geometry,
                kernel,
                windows,
                shape[lead:],
                count_include_pad,
                divisor_override,
                g.dtype,
            )
            share = g(*i[:lead], *windows) / divisor
            return te.sum(tirx.if_then_else(there, share, tirx.const(0, g.dtype)), axis=tap)

        return te.compute(shape, element, name="avg_pool_backward")

    return emitter.te("avg_pool_backward", compute, grad, relax.ShapeExpr(emitter.wanted_shape))
