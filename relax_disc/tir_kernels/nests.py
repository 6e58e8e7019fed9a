"""Kernels outside of block form (scatters, cumulative sums), read as nests of loops.

A loop whose variable is an index, at one place, of all that a nest writes is *owned*: its
iterations touch nothing of each other's, so they may run at the same time.  The others are *walked*
in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import s_tir, tirx

from relax_disc.analysis.kernels.stages import constant, loads_of


@dataclass(frozen=True, eq=False)
class Nest:
    """``for loops: if conditions: store``."""

    loops: tuple[Any, ...]
    conditions: tuple[Any, ...]
    store: Any

    @property
    def reads(self) -> list[Any]:
        """All that is read for a store."""
        expressions = [*self.conditions, *self.store.indices, self.store.value]
        return [load for expr in expressions for load in loads_of(expr)]

    def reads_of(self, buffer: Any) -> list[list[Any]]:
        """Places at which it reads a buffer."""
        return [list(load.indices) for load in self.reads if load.source.same_as(buffer)]

    @cached_property
    def owned(self) -> list[Any]:
        """Loops of which no two iterations touch the same."""
        return [x for x in self.loops if _owned_at([self], x.loop_var, self.store.buffer)]

    @cached_property
    def walked(self) -> list[Any]:
        """Loops that run in order."""
        return [x for x in self.loops if x not in self.owned]


def read_nests(func: tirx.PrimFunc) -> list[Nest] | None:
    """Read a kernel as nests that may run one after the other, each to its end; None: it is not."""
    root = func.body
    if not isinstance(root, s_tir.SBlockRealize) or root.block.iter_vars:
        return None
    if root.block.alloc_buffers:
        return None
    nests = _read(root.block.body, (), ())
    return nests if nests is not None and _may_run_apart(nests) else None


def _read(statement: Any, loops: tuple[Any, ...], conditions: tuple[Any, ...]) -> list[Nest] | None:
    """Read statements as nests, one for each store; None when they have another form."""
    if isinstance(statement, tirx.BufferStore):
        return [Nest(loops, conditions, statement)]
    if isinstance(statement, tirx.For):
        plain = statement.kind in (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL)
        if not plain or constant(statement.min) != 0:
            return None
        return _read(statement.body, (*loops, statement), conditions)
    if isinstance(statement, tirx.IfThenElse) and statement.else_case is None:
        return _read(statement.then_case, loops, (*conditions, statement.condition))
    if not isinstance(statement, tirx.SeqStmt):
        return None
    nests = [_read(part, loops, conditions) for part in statement.seq]
    if any(found is None for found in nests):
        return None
    return [nest for found in nests if found is not None for nest in found]


def _may_run_apart(nests: Sequence[Nest]) -> bool:
    """Whether loops round several nests may be loops round each."""
    written = [nest.store.buffer for nest in nests]
    for nest in nests:
        for around in nest.loops:
            sharing = [other for other in nests if around in other.loops]
            if len(sharing) > 1 and not all(
                _owned_at(sharing, around.loop_var, buffer) for buffer in written
            ):
                return False
    return True


def _owned_at(nests: Sequence[Nest], var: Any, buffer: Any) -> bool:
    """Whether a variable is the same index of a buffer wherever nests touch it."""
    places = [place for nest in nests for place in nest.reads_of(buffer)]
    places += [list(nest.store.indices) for nest in nests if nest.store.buffer.same_as(buffer)]
    return any(
        all(place[axis].same_as(var) for place in places) for axis in range(len(buffer.shape))
    )
