"""Pooling to a given size over windows whose width depends on the input's, and its gradients.

Output ``i`` of ``n`` covers inputs ``floor(i * m / n)`` to ``ceil((i + 1) * m / n)`` of ``m``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, te, tirx

from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter


def _windows(place: Sequence[Any], inner: Sequence[Any], outer: Sequence[Any]) -> list[Any]:
    """Start and end of the window of each axis."""
    each = zip(place, inner, outer, strict=True)
    return [(tirx.floordiv(p * m, n), tirx.floordiv((p + 1) * m + n - 1, n)) for p, m, n in each]


def _taps(inner: Sequence[Any], outer: Sequence[Any]) -> list[Any]:
    """Reduction axes as wide as the widest window."""
    each = enumerate(zip(inner, outer, strict=True))
    return [te.reduce_axis((0, tirx.floordiv(m + n - 1, n) + 1), f"k{d}") for d, (m, n) in each]


def _inside(read: Sequence[Any], windows: Sequence[Any]) -> Any:
    return tirx.all(*(p < end for p, (_, end) in zip(read, windows, strict=True)))


def _area(windows: Sequence[Any], dtype: str) -> Any:
    area: Any = tirx.IntImm("int64", 1)
    for start, end in windows:
        area = area * (end - start)
    return area.astype(dtype)


@converts("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def average(emitter: Emitter, x: Any, size: Any) -> Any:
    """Mean of each window."""
    rank = len(size)

    def compute(a: Any, shape: Any) -> Any:
        lead, inner, outer = len(shape) - rank, a.shape[-rank:], shape[-rank:]
        taps = _taps(inner, outer)

        def element(*i: Any) -> Any:
            windows = _windows(i[lead:], inner, outer)
            read = [start + k for (start, _), k in zip(windows, taps, strict=True)]
            value = tirx.if_then_else(
                _inside(read, windows), a(*i[:lead], *read), tirx.const(0, a.dtype)
            )
            return te.sum(value, axis=taps)

        total = te.compute(shape, element, name="window_sum")

        def mean(*i: Any) -> Any:
            return total(*i) / _area(_windows(i[lead:], inner, outer), a.dtype)

        return te.compute(shape, mean, name="adaptive_avg_pool")

    return emitter.te("adaptive_avg_pool", compute, x, relax.ShapeExpr(emitter.wanted_shape))


@converts(
    "aten._adaptive_avg_pool2d_backward.default", "aten._adaptive_avg_pool3d_backward.default"
)
def average_backward(emitter: Emitter, grad: Any, x: Any) -> Any:
    """Gradient of the mean: each input sums over the windows that hold it."""
    rank = 3 if "3d" in str(emitter.node.target) else 2

    def compute(g: Any, shape: Any) -> Any:
        lead, inner, outer = len(shape) - rank, shape[-rank:], g.shape[-rank:]
        taps = [te.reduce_axis((0, n), f"k{d}") for d, n in enumerate(outer)]

        def element(*i: Any) -> Any:
            windows = _windows(taps, inner, outer)
            held = tirx.all(
                *(c for p, (s, e) in zip(i[lead:], windows, strict=True) for c in (p >= s, p < e))
            )
            share = g(*i[:lead], *taps) / _area(windows, g.dtype)
            return te.sum(tirx.if_then_else(held, share, tirx.const(0, g.dtype)), axis=taps)

        return te.compute(shape, element, name="adaptive_avg_pool_backward")

    shape = relax.ShapeExpr(emitter.wanted_shape)
    return emitter.te("adaptive_avg_pool_backward", compute, grad, shape)


@converts("aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default")
def greatest(emitter: Emitter, x: Any, size: Any) -> Any:
    """Greatest element of each window and its flat position, the first of equals."""
    rank = len(size)
    shape = emitter.symbols.shape(emitter.wanted[0].shape)

    def top(a: Any, shape: Any) -> Any:
        lead, inner, outer = len(shape) - rank, a.shape[-rank:], shape[-rank:]
        taps = _taps(inner, outer)

        def element(*i: Any) -> Any:
            windows = _windows(i[lead:], inner, outer)
            read = [start + k for (start, _), k in zip(windows, taps, strict=True)]
            value = tirx.if_then_else(
                _inside(read, windows), a(*i[:lead], *read), tirx.min_value(a.dtype)
            )
            return te.max(value, axis=taps)

        return te.compute(shape, element, name="adaptive_max_pool")

    def position(a: Any, top: Any) -> Any:
        lead, inner, outer = len(top.shape) - rank, a.shape[-rank:], top.shape[-rank:]
        taps = _taps(inner, outer)
        none = tirx.const(2**62, "int64")

        def element(*i: Any) -> Any:
            windows = _windows(i[lead:], inner, outer)
            read = [start + k for (start, _), k in zip(windows, taps, strict=True)]
            hit = tirx.if_then_else(
                _inside(read, windows), a(*i[:lead], *read) == top(*i), tirx.const(False, "bool")
            )
            return te.min(tirx.Select(hit, _flat(read, inner), none), axis=taps)

        return te.compute(top.shape, element, name="adaptive_max_pool_position")

    best = emitter.te("adaptive_max_pool", top, x, relax.ShapeExpr(shape))
    return best, emitter.te("adaptive_max_pool_position", position, x, best)


@converts("aten.adaptive_max_pool2d_backward.default", "aten.adaptive_max_pool3d_backward.default")
def greatest_backward(emitter: Emitter, grad: Any, x: Any, indices: Any) -> Any:
    """Gradient of the greatest element, from the remembered positions."""
    rank = 3 if "3d" in str(emitter.node.target) else 2

    def compute(g: Any, indices: Any, shape: Any) -> Any:
        lead, inner, outer = len(shape) - rank, shape[-rank:], g.shape[-rank:]
        taps = [te.reduce_axis((0, n), f"k{d}") for d, n in enumerate(outer)]

        def element(*i: Any) -> Any:
            at = (*i[:lead], *taps)
            chosen = indices(*at) == _flat(i[lead:], inner)
            return te.sum(tirx.if_then_else(chosen, g(*at), tirx.const(0, g.dtype)), axis=taps)

        return te.compute(shape, element, name="adaptive_max_pool_backward")

    shape = relax.ShapeExpr(emitter.wanted_shape)
    return emitter.te("adaptive_max_pool_backward", compute, grad, indices, shape)


def _flat(place: Sequence[Any], extents: Sequence[Any]) -> Any:
    result = place[0]
    for p, n in zip(place[1:], extents[1:], strict=True):
        result = result * n + p
    return result
