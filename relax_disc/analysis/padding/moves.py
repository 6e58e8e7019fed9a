"""Kernels that take a part of the positions of each sequence, or put one back among zeros.

``logits[:, :-1]`` has a position less than the sequence, its gradient one more; of ``states[:, 0]``
there is one for each sequence, as of ``states[arange, last]`` with ``last`` read from the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tvm
from tvm import relax, tirx
from tvm.ir import prim
from tvm.sym.analyzer import Analyzer

from relax_disc.analysis.kernels.element import is_guard
from relax_disc.analysis.kernels.stages import constant, is_buffer, loads_of, read_stages, same_expr
from relax_disc.analysis.padding.values import (
    BATCH,
    Elements,
    StageReader,
    Value,
    is_readable,
    mentions_others,
)


@dataclass(frozen=True, slots=True)
class Move:
    """What a kernel does with the positions of its operand.

    ``kind``: ``"cut"``: it takes those from ``start`` on, as many as it has; ``"pad"``: it puts
    them at ``start``, among zeros; ``"pick"``: it takes the one at ``start``; ``"spread"``: it
    puts one there, among zeros. ``axis``: of the positions, in the tensor that has them all.
    ``start``: the expression of a position is read from the batch, one for each sequence. ``at``:
    which operand of the call has the positions that are picked; -1: none, `start` is a number.
    """

    kind: Literal["cut", "pad", "pick", "spread"]
    axis: int
    start: Any
    at: int = -1


def move_of(call: Any, module: tvm.IRModule, elements: Elements) -> Move | None:
    """Read the kernel that a call runs; None: it is no call, or its kernel does something else."""
    if not isinstance(call, relax.Call) or getattr(call.op, "name", "") != "relax.call_tir":
        return None
    return find_move(module[call.args[0]]) or _move_by_data(call, module, elements)


def _move_by_data(call: relax.Call, module: tvm.IRModule, elements: Elements) -> Move | None:
    """Read a kernel that picks positions which the batch names, one of each sequence."""
    if not isinstance(call.ty, relax.TensorType):
        return None
    kernel, shape = module[call.args[0]], call.ty.shape.values
    ones = [constant(extent) == 1 for extent in shape]
    indices = [0 if one else ("index", f"axis {k}") for k, one in enumerate(ones)]
    indices[:1] = [BATCH]
    read = read_stages(kernel)
    reader = elements.reader(call, indices)
    if reader is None or read is None or not shape or ones[0]:
        return None
    (stage,), source = read.stages, kernel.params[0]
    own = list(stage.indices)
    if stage.combiner is not None:
        return None
    if isinstance(stage.value, tvm.ir.TensorLoad) and stage.value.source.same_as(source):
        if len(stage.value.indices) < 2:
            return None
        first, place, *rest = stage.value.indices
        is_one = len(own) == len(rest) + 2 and ones[1]
        fits = _are(rest, own[2:] if is_one else own[1:]) and reader.value(first) == BATCH
        return _picked("pick", place, call, kernel, reader) if fits else None
    if len(own) < 2 or not is_guard(stage.value) or not _is_zero(stage.value.args[2]):
        return None
    condition, placed, _ = stage.value.args
    if not isinstance(condition, prim.EQ) or not isinstance(placed, tvm.ir.TensorLoad):
        return None
    loaded = list(placed.indices)
    if len(loaded) == len(own) and constant(loaded[1]) == 0:
        del loaded[1]
    is_there = _are(loaded, [own[0], *own[2:]]) and placed.source.same_as(source)
    for position, place in ((condition.a, condition.b), (condition.b, condition.a)):
        if is_there and position.same_as(own[1]):
            return _picked("spread", place, call, kernel, reader)
    return None


def _picked(
    kind: Literal["pick", "spread"],
    place: Any,
    call: relax.Call,
    kernel: tirx.PrimFunc,
    reader: StageReader,
) -> Move | None:
    """Take the place of an index for the position, if it is read from the batch or from sizes."""
    value: Value = reader.value(place)
    if mentions_others(value, (BATCH,)) or not is_readable(value):
        return None
    sources = {load.source for load in loads_of(place)}
    if not sources:
        return Move(kind, 1, value) if _is_size(value) else None
    found = [k for k, param in enumerate(kernel.params) if param in sources]
    is_one = len(found) == 1 and 0 < found[0] < len(call.args[1].fields)
    return Move(kind, 1, value, found[0]) if is_one else None


def _is_size(value: Value) -> bool:
    """Whether a position is a number, a size, or a sum or difference of those."""
    if not isinstance(value, tuple):
        return isinstance(value, int)
    return value[0] == "size" or (value[0] in ("add", "sub") and all(map(_is_size, value[1:])))


def find_move(kernel: tirx.PrimFunc) -> Move | None:
    """Read a kernel that moves positions; None: it does something else."""
    buffers = [param for param in kernel.params if is_buffer(param)]
    read = read_stages(kernel) if len(buffers) == 2 else None
    if read is None or len(read.stages) != 1:
        return None
    (stage,), (source, target) = read.stages, buffers
    own, loads = [axis.var for axis in stage.spatial], loads_of(stage.value)
    is_plain = stage.combiner is None and not stage.lets and _are(stage.indices, own)
    if not is_plain or len(loads) != 1 or not loads[0].source.same_as(source):
        return None
    indices = list(loads[0].indices)
    if isinstance(stage.value, tvm.ir.TensorLoad):
        if len(indices) == len(own) + 1:
            fixed = [axis for axis, index in enumerate(indices) if constant(index) is not None]
            axis = fixed[0] if len(fixed) == 1 else -1
            if axis == -1 or not _are(indices[:axis] + indices[axis + 1 :], own):
                return None
            return Move("pick", axis, int(indices[axis].value))
        return _cut(source, target, own, indices)
    if not is_guard(stage.value) or not _is_zero(stage.value.args[2]):
        return None
    return _put(stage.value, source, target, own, indices)


def _cut(source: Any, target: Any, own: list[Any], indices: list[Any]) -> Move | None:
    axis = _changed_axis(source, target)
    if axis is None or not _are(indices[:axis] + indices[axis + 1 :], own[:axis] + own[axis + 1 :]):
        return None
    shift = constant(Analyzer().simplify(indices[axis] - own[axis]))
    return None if shift is None or shift < 0 else Move("cut", axis, shift)


def _put(value: Any, source: Any, target: Any, own: list[Any], indices: list[Any]) -> Move | None:
    condition, placed, _ = value.args
    if not isinstance(placed, tvm.ir.TensorLoad):
        return None
    if len(indices) == len(own) - 1:
        is_at = isinstance(condition, prim.EQ) and constant(condition.b) is not None
        axis = next((k for k, var in enumerate(own) if is_at and condition.a.same_as(var)), None)
        if axis is None or not _are(indices, own[:axis] + own[axis + 1 :]):
            return None
        return Move("spread", axis, int(condition.b.value))
    axis = _changed_axis(source, target)
    if axis is None or not _are(indices[:axis] + indices[axis + 1 :], own[:axis] + own[axis + 1 :]):
        return None
    start = constant(Analyzer().simplify(own[axis] - indices[axis]))
    if start is None or start < 0:
        return None
    # All of the operand is put there: the condition holds for each of its positions.
    analyzer = Analyzer()
    analyzer.bind(own[axis], tvm.ir.Range.from_min_extent(start, source.shape[axis]))
    return Move("pad", axis, start) if analyzer.can_prove(condition) else None


def _changed_axis(source: Any, target: Any) -> int | None:
    """Find the one axis of which two buffers have not the same extent."""
    if len(source.shape) != len(target.shape):
        return None
    pairs = enumerate(zip(source.shape, target.shape, strict=True))
    changed = [axis for axis, (a, b) in pairs if not same_expr(a, b)]
    return changed[0] if len(changed) == 1 else None


def _are(indices: Sequence[Any], variables: Sequence[Any]) -> bool:
    return len(indices) == len(variables) and all(
        index.same_as(var) for index, var in zip(indices, variables, strict=True)
    )


def _is_zero(expr: Any) -> bool:
    return isinstance(expr, prim.FloatImm) and float(expr.value) == 0.0
