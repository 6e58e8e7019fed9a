"""CPU rule: kernels written as raw loops (scatters, `index_put`) lose the parallelism that races.

TVM spreads such loops without asking whether two iterations write the same element.  A parallel
loop becomes serial when a write's address depends on the loop only through values that are read
(``out[index[i]] += x[i]``), and when it starts anew inside another loop, where starting the threads
costs more than it brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.analysis.kernels.stages import nodes_of
from relax_disc.tir_kernels.loops import Scheduled
from relax_disc.tir_kernels.vectorizable import uses_any


class RawLoops:
    """Schedule rule for kernels outside of block form."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the kernel with safe loops, or None when it has none that need a change."""
        changed = False
        depth = 0

        def on_loop(nest: Any, mutator: Any) -> Any:
            nonlocal changed, depth
            depth += 1
            try:
                inside = mutator.default_mutate(nest)
            finally:
                depth -= 1
            if nest.kind != tirx.ForKind.PARALLEL or (depth == 0 and not _races(nest)):
                return inside
            changed = True
            return tirx.For(
                inside.loop_var, inside.min, inside.extent, tirx.ForKind.SERIAL, inside.body
            )

        body = mutate(func.body, (tirx.For, on_loop))
        return s_tir.Schedule(func.with_body(body)) if changed else None


def _races(nest: Any) -> bool:
    """Whether two iterations of a loop may write the same element."""
    stores = nodes_of(tirx.BufferStore, nest.body)
    return any(not _uses_directly(store.indices, nest.loop_var) for store in stores)


def _uses_directly(indices: Sequence[Any], var: Any) -> bool:
    """Whether a variable occurs in indices other than to look up further indices."""

    def without_reads(load: Any, mutator: Any) -> Any:
        return tirx.const(0, str(load.ty.dtype))

    return any(
        uses_any(mutate(index, (tvm.ir.TensorLoad, without_reads)), {var}) for index in indices
    )
