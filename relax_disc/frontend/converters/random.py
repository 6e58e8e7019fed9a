"""Random numbers from a counter, see :mod:`relax_disc.frontend.random_ops`.

Each draw is one kernel over the flat index.  It is marked opaque: fused into its readers it would
be computed once for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import OPAQUE, Emitter
from relax_disc.frontend.random_ops import MANTISSA_BITS, MULTIPLIERS, ROUNDS, WEYL

T: Any = builder
op: Any = relax.op


def _word(value: Any) -> Any:
    return value.astype("uint32")


def _philox(index: Any, stream: int, seed: Any, offset: Any) -> Any:
    """Bind the rounds of Philox4x32-10 in the current block; return the first word."""
    half = tirx.const(32, "int64")
    words = [
        T.Bind(_word(index)),
        T.Bind(_word(index >> half) ^ tirx.const(stream, "uint32")),
        T.Bind(_word(offset)),
        T.Bind(_word(offset >> half)),
    ]
    keys = [T.Bind(_word(seed)), T.Bind(_word(seed >> half))]
    shift = tirx.const(32, "uint64")
    for k in range(ROUNDS):
        products = [
            T.Bind(words[2 * j].astype("uint64") * tirx.const(MULTIPLIERS[j], "uint64"))
            for j in (0, 1)
        ]
        key = [keys[j] + tirx.const((WEYL[j] * k) & 0xFFFFFFFF, "uint32") for j in (0, 1)]
        high = [_word(product >> shift) for product in products]
        words = [
            T.Bind(high[1] ^ words[1] ^ key[0]),
            T.Bind(_word(products[1])),
            T.Bind(high[0] ^ words[3] ^ key[1]),
            T.Bind(_word(products[0])),
        ]
    return words[0]


def _draw(stream: int, dtype: str, finish: Callable[[Any], Any]) -> tirx.PrimFunc:
    """Build the kernel ``out[i] = finish(number in [0, 1) for i)``."""
    count = tirx.Var("count", "int64")
    with IRBuilder() as made:
        with T.prim_func(s_tir=True, private=True):
            T.func_name("draw")
            T.func_attr({"tirx.noalias": True, "op_pattern": OPAQUE})
            rng = T.arg("rng", T.buffer((2,), "int64"))
            out = T.arg("out", T.buffer((count,), dtype))
            with T.grid(count) as loop:
                loop = loop if isinstance(loop, tirx.Var) else loop[0]
                with T.sblock("draw"):
                    i = T.axis.remap("S", [loop], dtype="int64")
                    T.reads(rng[0:2])
                    T.writes(out[i])
                    word = _philox(i, stream, rng[0], rng[1])
                    cut = (word >> tirx.const(32 - MANTISSA_BITS, "uint32")).astype("float32")
                    number = T.Bind(cut * tirx.const(2.0**-MANTISSA_BITS, "float32"))
                    T.buffer_store(out, finish(number), [i])
    return made.get()  # pyright: ignore[reportReturnType]


def _emit(emitter: Emitter, rng: Any, stream: int, finish: Callable[[Any], Any]) -> relax.Expr:
    shape, dtype = emitter.wanted_shape, emitter.wanted_dtype
    count: Any = tirx.IntImm("int64", 1)
    for extent in shape:
        count = count * extent
    count = emitter.symbols.analyzer.simplify(count)
    kernel = _draw(stream, dtype, finish)
    flat = emitter.kernel(kernel, "draw", [rng], relax.TensorType([count], dtype))
    return emitter.emit(op.reshape(flat, relax.ShapeExpr(shape)))


@converts("relax_disc.uniform.default")
def uniform(emitter: Emitter, rng: Any, shape: Any, stream: int) -> Any:
    """Numbers in [0, 1) for every element, a pure function of seed, offset, stream and index."""
    return _emit(emitter, rng, stream, lambda number: number)


@converts("relax_disc.keep.default")
def keep(emitter: Emitter, rng: Any, shape: Any, stream: int, p: float) -> Any:
    """Say for every element whether its number is at least ``p``."""
    return _emit(emitter, rng, stream, lambda number: number >= tirx.const(p, "float32"))
