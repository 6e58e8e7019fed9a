"""Prove which results of a kernel may be written over an input that dies there.

An output may overlay an input of the same shape and type when every element of the input is read
only for the element of the output at the same index, or before the output is first written.  The
proof looks through intermediate values, so that it holds for the kernel as it stands and for any
schedule that computes an element (or a row) from its inputs before it writes that element (row).
Limits: kernels that `read_stages` cannot read have no pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx

from relax_disc.analysis.kernels.element import Element, Inliner, rename_axes
from relax_disc.analysis.kernels.stages import (
    Stage,
    StagedKernel,
    constant,
    loads_of,
    read_stages,
    same_expr,
)

Reads = tuple[list[Any], list[Any]]

# A scheduled kernel no longer shows its stages; `ScheduleKernels` leaves the proof behind.
INPLACE_ATTRIBUTE = "relax_disc.inplace"


def inplace_pairs(func: tirx.PrimFunc) -> tuple[tuple[int, int], ...]:
    """Find pairs of parameters of which the output may be the input's own memory.

    ``func``: as legalized, fused or scheduled; not changed. ``pairs``: positions in
    ``func.params``, input first, in order. Each pair holds by itself and together with other pairs
    of different inputs and outputs.
    """
    if INPLACE_ATTRIBUTE in func.attrs:
        return tuple((int(i), int(o)) for i, o in func.attrs[INPLACE_ATTRIBUTE])
    kernel = read_stages(func)
    if kernel is None:
        return ()
    position = {param: index for index, param in enumerate(func.params)}
    has_reduction = any(stage.combiner is not None for stage in kernel.stages)
    inliner = Inliner(kernel, inline_outputs=not has_reduction)
    reads = [_reads_of(stage) for stage in kernel.stages]
    pairs = [
        (position[source], position[target])
        for target in kernel.outputs
        for source in _overlaid(kernel, target, inliner, reads)
    ]
    return tuple(sorted(pairs))


def _reads_of(stage: Stage) -> Reads:
    """List what a stage reads by its named values, and by itself."""
    return [load for _, expr in stage.lets for load in loads_of(expr)], loads_of(stage.value)


def _overlaid(
    kernel: StagedKernel, target: Any, inliner: Inliner, reads: Sequence[Reads]
) -> list[Any]:
    """List the inputs that an output may be written over; ``reads``: of each stage."""
    stages = kernel.stages
    writer = next(at for at, stage in enumerate(stages) if stage.buffer.same_as(target))
    if stages[writer].combiner is not None:
        return []
    sources = [
        source
        for source in kernel.inputs
        if _same_layout(source, target) and _safe_as_it_stands(stages, reads, writer, source)
    ]
    return _safe_inlined(kernel, writer, sources, inliner) if sources else []


def _same_layout(source: Any, target: Any) -> bool:
    return source.dtype == target.dtype and same_expr(list(source.shape), list(target.shape))


def _of(source: Any, loads: list[Any]) -> list[Any]:
    return [load for load in loads if load.source.same_as(source)]


def _safe_as_it_stands(
    stages: Sequence[Stage], reads: Sequence[Reads], writer: int, source: Any
) -> bool:
    """Stage after stage: reads come before, or at the index that is being written."""
    for at, stage in enumerate(stages):
        same_block = bool(stage.lets) and stage.lets is stages[writer].lets
        named, own = (_of(source, loads) for loads in reads[at])
        if (own and at > writer) or (named and at > writer and not same_block):
            return False
        if (at == writer or same_block) and not _at_written_index(own + named, stages[writer]):
            return False
    return True


def _at_written_index(reads: list[Any], stage: Stage) -> bool:
    return all(same_expr(list(load.indices), list(stage.indices)) for load in reads)


def _safe_inlined(
    kernel: StagedKernel, writer: int, sources: list[Any], inliner: Inliner
) -> list[Any]:
    """Sources that stay safe when intermediate values are computed where they are used.

    That is element by element, or row by row where the kernel reduces.
    """
    has_reduction = any(stage.combiner is not None for stage in kernel.stages)
    if not inliner.inlinable:
        return []
    written = kernel.stages[writer]
    is_late = False
    for stage in inliner.remaining(kernel):
        if not inliner.reads(stage).intersection(sources):
            is_late |= has_reduction and stage is written
            continue
        element = _on_axes_of(inliner, stage, written)
        expressions = (element or inliner.element(stage)).expressions
        loads = [load for expr in expressions for load in loads_of(expr)]
        safe = []
        for source in sources:
            reads = _of(source, loads)
            if not reads:
                is_safe = True
            elif element is None or is_late:
                is_safe = False
            elif stage is written or not has_reduction:
                is_safe = _at_written_index(reads, written)
            else:
                is_safe = _in_own_row(reads, written, element)
            if is_safe:
                safe.append(source)
        sources = safe
        is_late |= has_reduction and stage is written
    return sources


def _on_axes_of(inliner: Inliner, stage: Stage, written: Stage) -> Element | None:
    """Inline into a stage with its leading large axes renamed to those of the writing stage.

    None when it has more of them or their extents differ.
    """
    large = [axis for axis in stage.spatial if constant(axis.extent) != 1]
    other = [axis for axis in written.spatial if constant(axis.extent) != 1]
    if len(large) > len(other):
        return None
    for axis, like in zip(large, other, strict=False):
        if not same_expr(axis.extent, like.extent):
            return None
    mapping = {axis.var: like.var for axis, like in zip(large, other, strict=False)}
    for axis, like in zip(stage.spatial, written.spatial, strict=False):
        if constant(axis.extent) == 1 and constant(like.extent) == 1:
            mapping[axis.var] = like.var
    return inliner.element(rename_axes(stage, mapping, stage.axes))


def _in_own_row(reads: list[Any], written: Stage, element: Element) -> bool:
    """Whether an earlier stage of a row reads the source in the row that is written.

    The rows are the large axes of the earlier stage, renamed to the writer's leading ones: each
    must index the source where it indexes what is written.
    """
    large = [axis for axis in element.stage.spatial if constant(axis.extent) != 1]
    other = [axis for axis in written.spatial if constant(axis.extent) != 1]
    for row in other[: len(large)]:
        places = [
            at
            for at, index in enumerate(written.indices)
            if isinstance(index, tvm.ir.Var) and index.same_as(row.var)
        ]
        if len(places) != 1:
            return False
        if any(not load.indices[places[0]].same_as(row.var) for load in reads):
            return False
    return True
