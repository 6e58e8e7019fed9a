"""Schedule rules for CUDA: for element-wise kernels, rows and columns; TVM's; what always works.

From the special to the general.  Matrix products and attention go to libraries before kernels are
made.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import dlight

from relax_disc.tir_kernels.cuda.columns import Columns
from relax_disc.tir_kernels.cuda.elementwise import Elementwise
from relax_disc.tir_kernels.cuda.guarded import Guarded
from relax_disc.tir_kernels.cuda.one_thread import OneThread
from relax_disc.tir_kernels.cuda.raw_loops import RawLoops
from relax_disc.tir_kernels.cuda.rows import Rows


def cuda_rules() -> list[Any]:
    """List the rules in the order in which they are tried."""
    return [
        Guarded(Elementwise()),
        Guarded(Rows()),
        Guarded(Columns()),
        Guarded(RawLoops()),
        Guarded(dlight.gpu.Matmul()),
        Guarded(dlight.gpu.Reduction()),
        Guarded(dlight.gpu.GeneralReduction()),
        Guarded(dlight.gpu.Transpose()),
        Guarded(dlight.gpu.Fallback()),
        OneThread(),
    ]


__all__ = ["Columns", "Elementwise", "Guarded", "OneThread", "RawLoops", "Rows", "cuda_rules"]
