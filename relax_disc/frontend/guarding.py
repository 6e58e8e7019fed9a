"""The kernel that may stop a function before it writes anything: `vm_builtins/guard.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.ir import StringImm

from relax_disc.frontend.capture.source_lines import SourceLine
from relax_disc.frontend.emitter import Emitter
from relax_disc.vm_builtins.guard import GUARD


class Guards:
    """Emits the guards of one function; the first looks at everything.

    ``buffers`` are names and new values of the buffers that the function writes, ``flags`` those of
    `IndexChecks`.
    """

    def __init__(
        self,
        emitter: Emitter,
        loss: relax.Expr,
        buffers: Sequence[tuple[str, Any]],
        flags: Sequence[Any],
    ) -> None:
        self._emitter, self._loss = emitter, loss
        floats = [(x, StringImm(name)) for name, x in buffers if "float" in emitter.dtype(x)]
        self._rest = [relax.prim_value(len(floats)), *(part for pair in floats for part in pair)]
        self._rest += flags

    def behind(self, hyper: relax.Var) -> relax.Var:
        """Return hyper-parameters that are there only when nothing forbids the step."""
        self._emitter.locate(f"{hyper.name}_checked", SourceLine("", 0))
        call = relax.call_dps_packed(GUARD, [hyper, self._loss, *self._rest], hyper.ty)
        self._rest = [relax.prim_value(0)]
        return self._emitter.emit(call)

    def token(self) -> relax.Var:
        """Guard a function without hyper-parameters; the result must be returned."""
        self._emitter.locate("guarded", SourceLine("", 0))
        nothing = relax.const([0.0], "float32")
        kind = relax.TensorType([1], "float32")
        return self._emitter.emit(
            relax.call_dps_packed(GUARD, [nothing, nothing, *self._rest], kind)
        )
