"""Whether a kernel computes each row from the same row of its operands alone.

Then it computes packed rows as well, called with other extents: its text does not say which row
comes where.  So the variables of sequence and position may occur as the indices of row axes only,
and the extents of those axes nowhere but in loops and shapes.  Loops that write where a tensor
says, as scatters do, go row by row if each of their turns reads and writes one row alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.element import is_guard
from relax_disc.analysis.kernels.mutate import mutate, walk
from relax_disc.analysis.kernels.stages import (
    Stage,
    constant,
    is_buffer,
    loops_of,
    nodes_of,
    read_stages,
    same_expr,
)
from relax_disc.analysis.padding.grid import Rows
from relax_disc.analysis.padding.support import NOWHERE, Support, in_all, in_any


def kernel_rows(
    kernel: tirx.PrimFunc,
    operands: Sequence[Rows],
    results: Sequence[Rows],
    support: Sequence[Support],
) -> tuple[Support, ...] | None:
    """Return the supports of what a kernel makes that works row by row.

    None: it does not, or cannot be read.
    ``operands``, ``results``: where the caller's tensors have rows. ``support``: of each operand.
    """
    staged = read_stages(kernel)
    stages = loops_of(kernel) if staged is None else staged.stages
    buffers = [param for param in kernel.params if is_buffer(param)]
    if stages is None or len(buffers) != len(operands) + len(results):
        return None
    rows = dict(zip(buffers, [*operands, *results], strict=True))
    lengths = {each.of for each in rows.values() if each.length != -1}
    if len(lengths) > 1 or any(each.layout == "odd" for each in rows.values()):
        return None
    sizes = {
        var
        for buffer, each in rows.items()
        for axis in each.axes
        for var in nodes_of(tvm.ir.Var, buffer.shape[axis])
    }
    # Numbers that it is given may be sizes, too: packed rows would come with others.
    sizes |= {param for param in kernel.params if not is_buffer(param)}
    reader = _Reader(rows, sizes, dict(zip(buffers, support, strict=False)))
    if staged is None:
        written = {stage.buffer for stage in stages}
        if written != set(buffers[len(operands) :]) or not all(map(reader.read_loops, stages)):
            return None
        reader.note_written(stages)
    elif not all(map(reader.read, stages)):
        return None
    return tuple(map(reader.support.get, buffers[len(operands) :]))


class _Reader:
    """What is known of the buffers of a kernel, stage by stage."""

    def __init__(self, rows: dict[Any, Rows], sizes: set[Any], support: dict[Any, Support]) -> None:
        self._rows, self._sizes, self.support = rows, sizes, support

    def read_loops(self, stage: Stage) -> bool:
        """Whether each turn of loops reads and writes one row alone; others may come before."""
        known = self._rows[stage.buffer]
        place = {role: stage.indices[axis] for role, axis in _roles(known)}
        others = [index for axis, index in enumerate(stage.indices) if axis not in known.axes]
        read = dict(place)
        if not known.has_rows or not all(
            self._note_loads(expr, read) for expr in (stage.value, *others)
        ):
            return False
        extents = {axis.var: axis.extent for axis in stage.axes}
        is_whole = all(
            same_expr(extents.get(stage.indices[axis]), stage.buffer.shape[axis])
            for axis in known.axes
        )
        if read.keys() != place.keys() or len(set(place.values())) != len(place) or not is_whole:
            return False
        rest = [self._without_rows(expr) for expr in (stage.value, *others)]
        rest += [extent for var, extent in extents.items() if var not in set(place.values())]
        hidden = set(place.values()) | self._sizes
        return not any(var in hidden for expr in rest for var in nodes_of(tvm.ir.Var, expr))

    def note_written(self, stages: Sequence[Stage]) -> None:
        """Note where what loops write is not zero; what they read of it they wrote before."""
        written = {stage.buffer: NOWHERE for stage in stages}
        for buffer in written:
            values = [stage.value for stage in stages if stage.buffer.same_as(buffer)]
            found = in_any([_support(value, {**self.support, **written}) for value in values])
            self.support[buffer] = found if len(written) == 1 else None

    def read(self, stage: Stage) -> bool:
        """Note what a stage makes; False if it does not go row by row."""
        extents = {axis.var: axis.extent for axis in stage.spatial}
        place: dict[str, Any] = {}  # the variables of sequence, position, or row
        known = self._rows.get(stage.buffer)
        if known is not None and not _note(place, known, stage.indices):
            return False
        for expr in stage.expressions:
            if not self._note_loads(expr, place):
                return False
        if known is not None and not all(
            same_expr(extents.get(stage.indices[axis]), stage.buffer.shape[axis])
            for axis in known.axes
        ):
            return False  # it writes a part of the rows
        if not set(place.values()) <= set(extents) or len(set(place.values())) != len(place):
            return False
        rest = [self._without_rows(expr) for expr in stage.expressions]
        hidden = set(place.values()) | self._sizes
        if any(var in hidden for expr in rest for var in nodes_of(tvm.ir.Var, expr)):
            return False
        if known is None:
            axes = {role: _axis_of(stage.indices, var) for role, var in place.items()}
            if None in axes.values():
                return False
            self._rows[stage.buffer] = _rows(axes)
        others = [
            index
            for axis, index in enumerate(stage.indices)
            if axis not in self._rows[stage.buffer].axes
        ]
        if any(var in hidden for index in others for var in nodes_of(tvm.ir.Var, index)):
            return False
        starts_zero = stage.combiner == "add" and _support(stage.init, {}) == NOWHERE
        if not stage.lets and (stage.combiner is None or starts_zero):
            self.support[stage.buffer] = _support(stage.value, self.support)
        return True

    def _note_loads(self, expr: Any, place: dict[str, Any]) -> bool:
        found: list[bool] = []

        def note(load: Any) -> None:
            rows = self._rows.get(load.source)
            found.append(rows is None or _note(place, rows, load.indices))

        walk(expr, tvm.ir.TensorLoad, note)
        return all(found)

    def _without_rows(self, expr: Any) -> Any:
        """Put for each read the sum of its indices, without those of row axes.

        What is left has the variables that a value depends on, and not those of buffers' types.
        """

        def on_load(load: Any, mutator: Any) -> Any:
            rows = self._rows.get(load.source)
            axes = frozenset() if rows is None else rows.axes
            total: Any = tirx.IntImm("int64", 0)
            for axis, index in enumerate(load.indices):
                if axis not in axes:
                    total = total + tirx.Cast("int64", mutator.mutate(index))
            return tirx.Cast(str(load.ty.dtype), total)

        return mutate(expr, (tvm.ir.TensorLoad, on_load))


def _note(place: dict[str, Any], rows: Rows, indices: Sequence[Any]) -> bool:
    """Enter the variables at the row axes; False if others were there before, or none are."""
    for role, axis in _roles(rows):
        index = indices[axis]
        if not isinstance(index, tvm.ir.Var) or not place.setdefault(role, index).same_as(index):
            return False
    return True


def _roles(rows: Rows) -> list[tuple[str, int]]:
    if rows.layout == "merged":
        return [("row", rows.batch)]
    named = (("batch", rows.batch), ("length", rows.length))
    return [(role, axis) for role, axis in named if axis != -1]


def _rows(axes: dict[str, Any]) -> Rows:
    if "row" in axes:
        return Rows("merged", axes["row"], axes["row"])
    match sorted(axes):
        case ["batch", "length"]:
            return Rows("both", axes["batch"], axes["length"])
        case ["batch"]:
            return Rows("batch", batch=axes["batch"])
        case ["length"]:
            return Rows("length", length=axes["length"])
    return Rows("none")


def _axis_of(indices: Sequence[Any], var: Any) -> int | None:
    places = [axis for axis, index in enumerate(indices) if index.same_as(var)]
    return places[0] if len(places) == 1 else None


def _support(expr: Any, known: Mapping[Any, Support]) -> Support:
    """Support of a value that reads buffers of known support; values are taken as finite."""
    if isinstance(expr, tvm.ir.TensorLoad):
        return known.get(expr.source)
    if isinstance(expr, prim.FloatImm):
        return NOWHERE if float(expr.value) == 0.0 else None
    if constant(expr) is not None:
        return NOWHERE if constant(expr) == 0 else None
    if isinstance(expr, prim.Cast):
        return _support(expr.value, known)
    if isinstance(expr, prim.Mul):
        return in_all([_support(expr.a, known), _support(expr.b, known)])
    if isinstance(expr, prim.Add | prim.Sub):
        return in_any([_support(expr.a, known), _support(expr.b, known)])
    if isinstance(expr, prim.Div):
        return _support(expr.a, known)
    if is_guard(expr):
        return in_any([_support(branch, known) for branch in expr.args[1:]])
    if isinstance(expr, prim.Select):
        return in_any([_support(expr.true_value, known), _support(expr.false_value, known)])
    return None
