"""Matrix products; convolutions, pooling and bilinear resizing with channels last.

Layers over one axis are layers over two in PyTorch's own decompositions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from relax_disc import ops
from relax_disc.frontend import fallback
from relax_disc.frontend.converters.registry import WIDE, converts
from relax_disc.frontend.emitter import Emitter
from relax_disc.ops.convolution import Geometry


@converts("aten.mm.default", "aten.bmm.default")
def matmul(emitter: Emitter, x: Any, y: Any) -> Any:
    """Matrix product; short floats are summed in float32, as PyTorch does."""
    if emitter.dtype(x) != emitter.dtype(y):
        raise emitter.refuse(f"it mixes {emitter.dtype(x)} and {emitter.dtype(y)}")
    return product(emitter, x, y)


def product(emitter: Emitter, x: Any, y: Any) -> Any:
    """Emit a matrix product of two tensors of one type, summed in float32 for short floats."""
    dtype = emitter.dtype(x)
    whole = emitter.emit(relax.op.matmul(x, y, out_dtype=WIDE.get(dtype, dtype)))
    return emitter.cast(whole, dtype)


op: Any = relax.op


def _geometry(
    rank: int,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> tuple[Geometry, bool]:
    """Read the settings that both operators of PyTorch have; also whether it is transposed."""

    def spread(values: Any) -> tuple[int, ...]:
        values = [int(v) for v in values]
        return tuple(values * rank if len(values) == 1 else values)

    return Geometry(spread(stride), spread(padding), spread(dilation), int(groups)), transposed


def _stored(shape: Sequence[Any]) -> list[Any]:
    return [shape[0], *shape[2:], shape[1]]


@converts("aten.convolution.default")
def convolution(emitter: Emitter, x: Any, weight: Any, bias: Any, *settings: Any) -> Any:
    """Convolution with an optional bias; output padding is in the result's shape."""
    geometry, transposed = _geometry(len(emitter.shape(x)) - 2, *settings)
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
    emitter: Emitter, grad: Any, x: Any, weight: Any, bias_sizes: Any, *settings: Any
) -> Any:
    """Gradients of a convolution by input, weight and bias; those not wanted are ``None``."""
    *own, wanted = settings
    rank = len(emitter.shape(x)) - 2
    geometry, transposed = _geometry(rank, *own)
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


_KINDS = ("avg_pool", "max_pool{}_with_indices", "_adaptive_avg_pool", "adaptive_max_pool")
_FORWARD = [
    f"aten.{kind.format(rank) if '{' in kind else kind + rank}"
    for kind in _KINDS
    for rank in ("2d", "3d")
]


@converts(*(f"{name}.default" for name in _FORWARD))
def pool(emitter: Emitter, *args: Any) -> Any:
    """A mean or the greatest element of each window, with the position of the latter."""
    return _call(emitter, args)


@converts(*(f"{name}_backward.default" for name in _FORWARD))
def pool_backward(emitter: Emitter, *args: Any) -> Any:
    """Gradient of pooling; of the input only its sizes are read."""
    return _call(emitter, args, sizes_only=("self", "input"))


@converts("aten.upsample_bilinear2d.default", "aten.upsample_bilinear2d_backward.default")
def upsample(emitter: Emitter, *args: Any) -> Any:
    """Bilinear resizing of planes."""
    return fallback.call(emitter, list(args), {}, channels_last=True)


def _call(emitter: Emitter, args: Any, sizes_only: tuple[str, ...] = ()) -> Any:
    name = str(emitter.node.target)
    batched = len(emitter.shape(args[0])) == (5 if "3d" in name else 4)
    # These of PyTorch take their results for contiguous, whatever their strides.
    contiguous = name.startswith(("aten.avg_pool3d", "aten.adaptive_max_pool3d"))
    channels_last = batched and not contiguous
    return fallback.call(
        emitter, list(args), {}, channels_last=channels_last, sizes_only=sizes_only
    )
