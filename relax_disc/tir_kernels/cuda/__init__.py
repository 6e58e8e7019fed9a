"""Schedule rules for CUDA: TVM's dlight, then what always works.

The order is dlight's own: from the special to the general.  Matrix products and attention go to
libraries before kernels are made, so what is left are element-wise kernels and reductions.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import dlight

from relax_disc.tir_kernels.cuda.guarded import Guarded
from relax_disc.tir_kernels.cuda.one_thread import OneThread


def cuda_rules() -> list[Any]:
    """List the rules in the order in which they are tried."""
    return [
        Guarded(dlight.gpu.Matmul()),
        Guarded(dlight.gpu.Reduction()),
        Guarded(dlight.gpu.GeneralReduction()),
        Guarded(dlight.gpu.Transpose()),
        Guarded(dlight.gpu.Fallback()),
        OneThread(),
    ]


__all__ = ["Guarded", "OneThread", "cuda_rules"]
