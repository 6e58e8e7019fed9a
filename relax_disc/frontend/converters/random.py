"""Random numbers from a counter, see :mod:`relax_disc.frontend.random_ops`."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter
from relax_disc.frontend.random_ops import MANTISSA_BITS, MULTIPLIERS, ROUNDS, WEYL


def _word(value: Any) -> Any:
    return value.astype("uint32")


def philox(index: Any, stream: Any, seed: Any, offset: Any) -> Any:
    """Write the first word of Philox4x32-10 as one expression.

    Parameters
    ----------
    index, seed, offset : tirx.Expr
        int64.
    stream : int
        Mixed into the high word of the index.
    """
    bound: list[tuple[Any, Any]] = []

    def let(value: Any) -> Any:
        var = tirx.Var(f"w{len(bound)}", str(value.ty.dtype))
        bound.append((var, value))
        return var

    half = tirx.const(32, "int64")
    words = [
        let(_word(index)),
        let(_word(index >> half) ^ tirx.const(stream, "uint32")),
        let(_word(offset)),
        let(_word(offset >> half)),
    ]
    keys = [let(_word(seed)), let(_word(seed >> half))]
    shift = tirx.const(32, "uint64")
    for k in range(ROUNDS):
        products = [
            let(words[2 * j].astype("uint64") * tirx.const(MULTIPLIERS[j], "uint64"))
            for j in (0, 1)
        ]
        key = [keys[j] + tirx.const((WEYL[j] * k) & 0xFFFFFFFF, "uint32") for j in (0, 1)]
        high = [_word(product >> shift) for product in products]
        words = [
            let(high[1] ^ words[1] ^ key[0]),
            let(_word(products[1])),
            let(high[0] ^ words[3] ^ key[1]),
            let(_word(products[0])),
        ]
    body = words[0]
    for var, value in reversed(bound):
        body = tirx.Let(var, value, body)
    return body


@converts("relax_disc.uniform.default")
def uniform(emitter: Emitter, rng: Any, shape: Any, stream: int) -> Any:
    """Numbers in [0, 1) for every element, a pure function of seed, offset, stream and index."""

    def compute(rng: Any, shape: Any) -> Any:
        def element(*i: Any) -> Any:
            index: Any = tirx.IntImm("int64", 0)
            for position, extent in zip(i, shape, strict=True):
                index = index * extent + position
            word = philox(index, stream, rng[0], rng[1])
            cut = (word >> tirx.const(32 - MANTISSA_BITS, "uint32")).astype("float32")
            return cut * tirx.const(2.0**-MANTISSA_BITS, "float32")

        return te.compute(shape, element, name="uniform")

    return emitter.te("uniform", compute, rng, relax.ShapeExpr(emitter.wanted_shape))
