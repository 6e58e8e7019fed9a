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
        held=_some_steps(emitter, call.count),
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


def _some_steps(emitter: Emitter, count: Any) -> dict[Any, int]:
    """Sizes of the dims of a number of steps that make four: what one carries lives in the next."""
    expression: Any = count.node.expr if isinstance(count, torch.SymInt) else sympy.Integer(count)
    sizes: dict[Any, int] = {}
    for factor in range(1, _MOST_DOUBLINGS):
        before, sizes = (
            sizes,
            {s: emitter.symbols.size_in_range(s, 2**factor) for s in expression.free_symbols},
        )
        if sizes == before or expression.xreplace(sizes) >= 4:
            break
    return sizes
