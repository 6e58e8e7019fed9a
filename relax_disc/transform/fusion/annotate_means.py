"""Let `FuseOps` treat a mean as the reduction that it is; for CUDA.

TVM takes a kernel of two stages, a sum and its division, for something like a convolution, and
fuses no producer with it: the squares of a root mean square were written to memory.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from relax_disc.analysis.kernels.stages import StagedKernel, loads_of, read_stages, same_expr
from relax_disc.transform.functions import copy_module
from relax_disc.transform.fusion.producers import REDUCTION

_PATTERN = "op_pattern"


@tvm.transform.module_pass(opt_level=0, name="AnnotateMeans")
class AnnotateMeans:
    """Mark kernels that only rescale what they reduce; run after `AnnotateTIROpPattern`."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with other marks."""
        del ctx
        result = copy_module(mod)
        for variable, function in mod.functions_items():
            if isinstance(function, tirx.PrimFunc) and _is_mean(function):
                result.update_func(variable, function.with_attr(_PATTERN, REDUCTION))
        return result


def _is_mean(function: tirx.PrimFunc) -> bool:
    pattern: Any = (function.attrs or {}).get(_PATTERN)
    if pattern is None or int(pattern) <= REDUCTION:
        return False
    kernel = read_stages(function)
    return kernel is not None and len(kernel.stages) == 2 and _rescales(kernel)


def _rescales(kernel: StagedKernel) -> bool:
    """Whether the second of two stages reads the first, a sum, at its own element and no more."""
    total, result = kernel.stages
    if total.combiner != "add" or result.combiner is not None or result.lets:
        return False
    loads = loads_of(result.value)
    if len(loads) != 1 or not loads[0].source.same_as(total.buffer):
        return False
    return same_expr(list(loads[0].indices), list(result.indices))
