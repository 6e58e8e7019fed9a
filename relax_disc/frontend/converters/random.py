"""Random numbers from a counter, see :mod:`relax_disc.frontend.random_ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, tirx

from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter
from relax_disc.ops.philox import draw, keeps

op: Any = relax.op


def _emit(emitter: Emitter, rng: Any, stream: int, finish: Callable[[Any], Any]) -> relax.Expr:
    shape, dtype = emitter.wanted_shape, emitter.wanted_dtype
    count: Any = tirx.IntImm("int64", 1)
    for extent in shape:
        count = count * extent
    count = emitter.symbols.analyzer.simplify(count)
    kernel = draw(stream, dtype, finish)
    flat = emitter.kernel(kernel, "draw", [rng], relax.TensorType([count], dtype))
    return emitter.emit(op.reshape(flat, relax.ShapeExpr(shape)))


@converts("relax_disc.uniform.default")
def uniform(emitter: Emitter, rng: Any, shape: Any, stream: int) -> Any:
    """Numbers in [0, 1) for every element, a pure function of seed, offset, stream and index."""
    return _emit(emitter, rng, stream, lambda number: number)


@converts("relax_disc.keep.default")
def keep(emitter: Emitter, rng: Any, shape: Any, stream: int, p: float) -> Any:
    """Say for every element whether its number is at least ``p``."""
    return _emit(emitter, rng, stream, keeps(p))
