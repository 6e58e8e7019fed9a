"""Loops over a dynamic length."""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.ir import StringImm

from relax_disc.frontend.aten_workspace import scratch_bytes
from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter
from relax_disc.ops import loop


@converts("relax_disc.loop_call.default")
def loop_call(emitter: Emitter, number: int, operands: list[Any]) -> Any:
    """All steps of a loop, one call."""
    call = loop.known_call(number)
    held = {s for n in (call.count,) if hasattr(n, "node") for s in n.node.expr.free_symbols}
    scratch = scratch_bytes(
        emitter.symbols,
        call.recipe,
        [*call.operands, *call.numbers],
        call.results,
        function=loop.CALL,
        growing=call.step,
        held=held,
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
