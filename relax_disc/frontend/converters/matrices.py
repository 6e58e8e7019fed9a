"""Matrix products."""

from __future__ import annotations

from typing import Any

from tvm import relax

from relax_disc.frontend.converters.registry import WIDE, converts
from relax_disc.frontend.emitter import Emitter


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
