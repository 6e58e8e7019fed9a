"""Kernels that take a part of the positions of each sequence, or put one back among zeros.

``logits[:, :-1]`` has a position less than the sequence, its gradient one more; of ``states[:, 0]``
there is one for each sequence.
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
from relax_disc.analysis.kernels.stages import (
    constant,
    is_buffer,
    loads_of,
    read_stages,
    same_expr,
)


@dataclass(frozen=True, slots=True)
class Move:
    """What a kernel does with the positions of its operand.

    Attributes
    ----------
    kind : str
        ``"cut"``: it takes those from ``start`` on, as many as it has; ``"pad"``: it puts them at
        ``start``, among zeros; ``"pick"``: it takes the one at ``start``; ``"spread"``: it puts one
        there, among zeros.
    axis : int
        Of the positions, in the tensor that has them all.
    start : int
    """

    kind: Literal["cut", "pad", "pick", "spread"]
    axis: int
    start: int


def move_of(call: Any, module: tvm.IRModule) -> Move | None:
    """Read the kernel that a call runs; None: it is no call, or its kernel does something else."""
    if not isinstance(call, relax.Call) or getattr(call.op, "name", "") != "relax.call_tir":
        return None
    return find_move(module[call.args[0]])


def find_move(kernel: tirx.PrimFunc) -> Move | None:
    """Read a kernel that moves positions; None: it does something else."""
    buffers = [param for param in kernel.params if is_buffer(param)]
    read = read_stages(kernel) if len(buffers) == len(kernel.params) == 2 else None
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
