"""Operators whose result has as many rows as the data say."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter, dtype_name
from relax_disc.ops import counted

op: Any = relax.op


@converts("aten.nonzero.default")
def nonzero(emitter: Emitter, x: Any) -> Any:
    """Positions ``[count, 1]`` of the true elements; the trace asks for those of one axis alone."""
    if emitter.dtype(x) != "bool" or len(emitter.shape(x)) != 1:
        raise emitter.refuse("it counts the elements of a mask with one axis alone")
    found = emitter.emit(counted.nonzero(x, emitter.counted_dim))
    return emitter.emit(op.reshape(found, relax.ShapeExpr(emitter.wanted_shape)))


@converts("aten._unique2.default")
def unique(
    emitter: Emitter,
    x: Any,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Any, ...]:
    """Distinct values in order; on request where each element's is, and how often each is there."""
    fakes, dtype = emitter.node.meta["val"], emitter.dtype(x)
    kept = {"float32", "float64", "int32", "int64"}
    wide = dtype if dtype in kept else "float32" if "float" in dtype else "int32"
    wanted = relax.ShapeExpr(emitter.symbols.shape(fakes[0].shape))
    elements = emitter.symbols.size(emitter.value(emitter.node.args[0]).numel())
    flat = emitter.emit(op.reshape(emitter.cast(x, wide), relax.ShapeExpr([elements])))
    values, inverse, counts, _ = emitter.elements(
        emitter.emit(counted.unique(flat, emitter.counted_dim))
    )
    values, counts = (emitter.emit(op.reshape(each, wanted)) for each in (values, counts))
    nothing = emitter.emit(relax.const(np.zeros(0, "int64"), "int64"))
    shape = relax.ShapeExpr(emitter.shape(x))
    return (
        emitter.cast(values, dtype_name(fakes[0].dtype)),
        emitter.emit(op.reshape(inverse, shape)) if return_inverse else nothing,
        counts if return_counts else nothing,
    )
