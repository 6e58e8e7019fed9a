"""Kernels that add up along one axis: ``out[.., k, ..] = out[.., k - 1, ..] + x[.., k, ..]``."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from relax_disc.analysis.kernels.stages import is_buffer, loops_of, same_expr


def cumulated_axis(kernel: tirx.PrimFunc) -> int | None:
    """Return the axis along which a kernel adds up its one operand; None: it does another thing."""
    buffers, stages = list(kernel.params), loops_of(kernel)
    if stages is None or len(stages) != 1 or len(buffers) != 2 or not all(map(is_buffer, buffers)):
        return None
    (stage,), (source, out) = stages, buffers
    variables = [axis.var for axis in stage.axes]
    if not stage.buffer.same_as(out) or len(set(variables)) != len(out.shape):
        return None
    is_whole = set(stage.indices) == set(variables) and all(
        same_expr(axis.extent, out.shape[list(stage.indices).index(axis.var)])
        for axis in stage.axes
    )
    if not is_whole or len(source.shape) != len(out.shape):
        return None
    # All loops go forward, so that what is before an element along any of them is there.
    for axis, at in enumerate(stage.indices):
        if same_expr(stage.value, _sum_up_to(source, out, stage, axis, at)):
            return axis
    return None


def _sum_up_to(source: Any, out: Any, stage: Any, axis: int, at: Any) -> Any:
    here = list(stage.indices)
    before = [tirx.max(k - 1, 0) if d == axis else k for d, k in enumerate(here)]
    element = source[tuple(here)]
    return tirx.if_then_else(at > 0, out[tuple(before)] + element, element)
