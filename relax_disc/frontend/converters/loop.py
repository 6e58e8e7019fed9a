"""Loops over a dynamic length."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from tvm import relax
from tvm.ir import StringImm

from relax_disc.frontend.aten_workspace import scratch_bytes
from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter
from relax_disc.ops import loop

_MOST_DOUBLINGS = 20  # chunks of a million
_FEW_STEPS = 64


@converts("relax_disc.loop_call.default")
def loop_call(emitter: Emitter, number: int, operands: list[Any]) -> Any:
    """All steps of a loop, one call."""
    call = loop.known_call(number)
    scratch = scratch_bytes(
        emitter.symbols,
        call.recipe,
        [*call.operands, *call.numbers],
        call.results,
        function=loop.CALL,
        growing=call.step,
        held=_some_steps(emitter, call),
        steps=call.count,
    )
    numbers = [emitter.symbols.size(n) for n in call.numbers]
    types = [emitter.type_of(result) for result in call.results]
    made = emitter.emit(
        relax.call_dps_packed(
            loop.CALL,
            [StringImm(call.recipe), scratch, *operands, *numbers],
            types[0] if len(types) == 1 else types,
        )
    )
    return [made] if len(types) == 1 else list(emitter.elements(made))


def _some_steps(emitter: Emitter, call: loop.LoopCall) -> dict[Any, int]:
    """Sizes of the dims of a number of steps that make four: what one carries lives in the next.

    Left out are those that a step grows with, if few steps are made of them (of a length in so many
    pieces), or it grows with nothing else.
    """
    count: Any = call.count
    expression: Any = count.node.expr if isinstance(count, torch.SymInt) else sympy.Integer(count)

    def sizes_of(length: int) -> dict[Any, int]:
        return {s: emitter.symbols.size_in_range(s, length) for s in expression.free_symbols}

    sizes: dict[Any, int] = {}
    for factor in range(1, _MOST_DOUBLINGS):
        sizes = sizes_of(2**factor)
        if expression.xreplace(sizes) >= 4:
            break
    numbers = [n for x in call.step for n in x.shape if isinstance(n, torch.SymInt)]
    growing = {symbol for number in numbers for symbol in number.node.expr.free_symbols}
    are_few = expression.xreplace(sizes_of(2**_MOST_DOUBLINGS)) <= _FEW_STEPS
    if are_few or growing <= sizes.keys():
        return {symbol: size for symbol, size in sizes.items() if symbol not in growing}
    return sizes
