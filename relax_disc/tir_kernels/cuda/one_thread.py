"""CUDA rule of last resort: the whole kernel in one thread, for raw loops that may conflict."""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.tir_kernels.cuda.threads import launch
from relax_disc.tir_kernels.flat import index_const
from relax_disc.tir_kernels.loops import Scheduled


class OneThread:
    """Schedule rule for anything: slow and right."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the kernel with serial loops inside one thread of one block."""
        root = func.body
        if not isinstance(root, s_tir.SBlockRealize) or root.block.iter_vars:
            return None
        body = mutate(root.block.body, (tirx.For, _serial))
        body = launch(index_const(1), 1, lambda block, thread: [body])
        block = root.block
        block = s_tir.SBlock(
            [], [], [], "root", body, alloc_buffers=block.alloc_buffers, annotations={}
        )
        return s_tir.Schedule(func.with_body(s_tir.SBlockRealize([], True, block)))


def _serial(loop: Any, mutator: Any) -> Any:
    loop = mutator.default_mutate(loop)
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)
