"""The kernel that draws numbers by Philox4x32-10, which the random operators are made of.

Each draw is one kernel over the flat index.  It is marked opaque: fused into its readers it would
be computed once for each of them.  See :mod:`relax_disc.frontend.random_ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

T: Any = builder

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MANTISSA_BITS = 24
"""Of the numbers drawn: every float32 in [0, 1) that is a multiple of 2**-24 is equally likely."""
_OPAQUE = 8  # TVM's OpPatternKind::kOpaque


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


def draw(stream: int, dtype: str, finish: Callable[[Any], Any]) -> tirx.PrimFunc:
    """Build the kernel ``out[i] = finish(number in [0, 1) for i)``."""
    count = tirx.Var("count", "int64")
    with IRBuilder() as made:
        with T.prim_func(s_tir=True, private=True):
            T.func_name("draw")
            T.func_attr({"tirx.noalias": True, "op_pattern": _OPAQUE})
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


def keeps(p: float) -> Callable[[Any], Any]:
    """Make the last part of a draw: whether a number is at least ``p``."""
    return lambda number: number >= tirx.const(p, "float32")
