"""Tensors made from nothing: constants, ranges and triangles."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter

op: Any = relax.op


def _filled(emitter: Emitter, value: Any) -> Any:
    """Broadcast a number to the wanted shape; a scalar stays a constant."""
    scalar = emitter.tensor(value, emitter.wanted_dtype)
    if not emitter.wanted_shape:
        return scalar if isinstance(scalar, relax.Var) else emitter.emit(scalar)
    return emitter.emit(op.broadcast_to(scalar, relax.ShapeExpr(emitter.wanted_shape)))


@converts("aten.full.default", "aten.full_like.default")
def full(emitter: Emitter, *args: Any, **options: Any) -> Any:
    """One value everywhere."""
    value = options.get("fill_value", args[-1])
    return _filled(emitter, value)


@converts("aten.scalar_tensor.default")
def scalar_tensor(emitter: Emitter, value: Any, dtype: Any = None) -> Any:
    """A number as a tensor."""
    return _filled(emitter, value)


@converts(
    "aten.empty.memory_format", "aten.empty_permuted.default", "aten.new_empty_strided.default"
)
def zeros(emitter: Emitter, *_: Any, **__: Any) -> Any:
    """Zeros; memory left undefined by PyTorch is zero here."""
    return _filled(emitter, 0)


@converts("aten.arange.start_step")
def arange(emitter: Emitter, *bounds: Any, dtype: Any = None) -> Any:
    """Equidistant numbers; computed as ``start + i * step``."""
    start, step = (0, 1) if len(bounds) < 2 else (bounds[0], bounds[2] if len(bounds) > 2 else 1)
    kind = emitter.wanted_dtype
    whole = "int" in kind
    accumulate = kind if whole or kind == "float64" else "float32"

    def compute(start: Any, step: Any, shape: Any) -> Any:
        def element(i: Any) -> Any:
            first, stride = (_number(x, accumulate) for x in (start, step))
            return (first + i.astype(accumulate) * stride).astype(kind)

        return te.compute(shape, element, name="arange")

    return emitter.te("arange", compute, start, step, relax.ShapeExpr(emitter.wanted_shape))


def _number(value: Any, dtype: str) -> Any:
    return tirx.const(value, dtype) if isinstance(value, int | float) else value.astype(dtype)


@converts("prims.iota.default")
def iota(
    emitter: Emitter,
    length: Any,
    start: Any = 0,
    step: Any = 1,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Any:
    """Whole numbers."""
    return arange(emitter, start, None, step)
