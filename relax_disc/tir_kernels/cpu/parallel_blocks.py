"""CPU rule of last resort for kernels in block form: the outer loops in parallel.

For what the other rules do not know (arg-max, reductions along a middle axis with a result of
another shape): injective producers are inlined, and each block's leading data-parallel loops are
spread over the threads.  Written with schedule primitives, which refuse what would be wrong.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.analysis.kernels.stages import constant
from relax_disc.tir_kernels.cpu.elementwise import SERIAL_ELEMENTS
from relax_disc.tir_kernels.loops import Scheduled


class ParallelBlocks:
    """Schedule rule for any kernel whose blocks have data-parallel outer loops."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when there is nothing to spread."""
        schedule = s_tir.Schedule(func)
        root = schedule.get_sblock("root") if _has_root(func) else None
        if root is None:
            return None
        for block in schedule.get_child_blocks(root):
            if _kinds(schedule, block) and not any(_kinds(schedule, block)):
                _try_inline(schedule, block)
        spread = [_spread(schedule, block) for block in schedule.get_child_blocks(root)]
        return schedule if any(spread) else None


def _has_root(func: tirx.PrimFunc) -> bool:
    return isinstance(func.body, s_tir.SBlockRealize) and func.body.block.name_hint == "root"


def _kinds(schedule: s_tir.Schedule, block: Any) -> list[int]:
    """List the kinds of a block's axes: 0 for data-parallel."""
    return [int(axis.iter_type) for axis in schedule.get(block).iter_vars]


def _try_inline(schedule: s_tir.Schedule, block: Any) -> None:
    try:
        schedule.compute_inline(block)
    except s_tir.ScheduleError:
        # An output, or read in a way that cannot be inlined: it stays a stage of its own.
        return


def _spread(schedule: s_tir.Schedule, block: Any) -> bool:
    """Make the leading data-parallel loops of a block one parallel loop."""
    loops = schedule.get_loops(block)
    kinds = _kinds(schedule, block)
    if len(loops) != len(kinds):
        return False
    leading = []
    for loop, kind in zip(loops, kinds, strict=True):
        if kind != 0:
            break
        leading.append(loop)
    size: int | None = 1
    for loop in loops:
        extent = constant(schedule.get(loop).extent)
        size = None if size is None or extent is None else size * extent
    if not leading or (size is not None and size <= SERIAL_ELEMENTS):
        return False
    schedule.parallel(schedule.fuse(*leading) if len(leading) > 1 else leading[0])
    return True
