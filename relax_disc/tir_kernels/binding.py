"""Name values inside loops, and keep the names from slowing TVM's passes down."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.tir_kernels.flat import STACK


def keep(name: str, value: Any) -> tuple[list[Any], Any]:
    """Evaluate a value once, for use in the statements that follow.

    Returned: statements to be executed before uses, and what stands for the value.
    """
    var = tirx.Var(name, str(value.ty.dtype))
    return [tirx.Bind(var, value)], var


def keep_in_buffers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Hold named floats in local buffers, one element for each lane; they become registers.

    TVM 0.27 looks through variables bound to values each time that they are used: the time of its
    passes is exponential in the length of a chain of values that are used twice (ten links took
    1.2 s, and take 8 ms in buffers).
    """
    body = _Keeper().run(func.body)
    return func if body.same_as(func.body) else func.with_body(body)


class _Keeper:
    """Replaces bindings; knows the vector loop around the statement at hand."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}
        self._lane: Any = None
        self._lanes: Any = 1
        self._buffers: list[Any] = []

    def run(self, body: Any) -> Any:
        return mutate(
            body,
            [
                (tirx.For, self._on_loop),
                (tirx.SeqStmt, self._on_sequence),
                (tirx.Bind, self._on_bind),
                (tvm.ir.Var, lambda var, mutator: self._kept.get(var, var)),
            ],
        )

    def _on_loop(self, loop: Any, mutator: Any) -> Any:
        if loop.kind != tirx.ForKind.VECTORIZED:
            return mutator.default_mutate(loop)
        self._lane, self._lanes, self._buffers = loop.loop_var, loop.extent, []
        changed = mutator.default_mutate(loop)
        buffers = self._buffers
        self._lane, self._lanes, self._buffers = None, 1, []
        return tirx.SeqStmt([*map(tirx.AllocBuffer, buffers), changed]) if buffers else changed

    def _on_sequence(self, sequence: Any, mutator: Any) -> Any:
        flat: list[Any] = []
        for statement in sequence.seq:
            changed = mutator.mutate(statement)
            flat.extend(changed.seq if isinstance(changed, tirx.SeqStmt) else [changed])
        return tirx.SeqStmt(flat)

    def _on_bind(self, bind: Any, mutator: Any) -> Any:
        dtype = str(bind.var.ty.dtype)
        value = mutator.mutate(bind.value)
        if not dtype.startswith("float"):
            return tirx.Bind(bind.var, value)
        buffer = tirx.decl_buffer((self._lanes,), dtype, str(bind.var.name), scope=STACK)
        index = [prim.IntImm("int64", 0) if self._lane is None else self._lane]
        self._kept[bind.var] = tirx.BufferLoad(buffer, index)
        store = tirx.BufferStore(buffer, value, index)
        if self._lane is None:
            return tirx.SeqStmt([tirx.AllocBuffer(buffer), store])
        self._buffers.append(buffer)
        return store
