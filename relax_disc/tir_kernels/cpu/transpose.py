"""CPU rule: element-wise kernels that read along another axis than they write.

Row after row, every element read would bring a cache line of which the next row needs the next
element, long after the line has gone.  In tiles, the lines stay for the few rows that share them.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import Element, Inliner
from relax_disc.analysis.kernels.stages import Axis, constant, loads_of, read_stages
from relax_disc.tir_kernels.cpu.elementwise import (
    SERIAL_ELEMENTS,
    emit_element,
    emit_outer,
    unit_mapping,
)
from relax_disc.tir_kernels.flat import FlatBuffers, as_index, index_const, product
from relax_disc.tir_kernels.loops import (
    Scheduled,
    Settings,
    TunedRule,
    group_mapping,
    lane_loops,
    loop,
    sequence,
    with_body,
)
from relax_disc.tir_kernels.vectorizable import moves_in_vectors, vectorizable

# Along a shorter axis a line is used up at once.
_SHORTEST = 8


class Transpose(TunedRule):
    """Schedule rule for one output, written along one axis and read along another."""

    tunes = ("lanes", "tile_rows")

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when it is another rule's."""
        kernel = read_stages(func)
        if kernel is None or any(stage.combiner is not None for stage in kernel.stages):
            return None
        inliner = Inliner(kernel, inline_outputs=True)
        remaining = inliner.remaining(kernel)
        if not inliner.inlinable or len(remaining) != 1:
            return None
        (element,) = inliner.elements(remaining)
        axes = [axis for axis in element.stage.axes if constant(axis.extent) != 1]
        read = _read_axis(element, axes)
        size = constant(product([axis.extent for axis in axes]))
        if read is None or (size is not None and size <= SERIAL_ELEMENTS):
            return None
        flat = FlatBuffers(bits=True)
        statements = _emit(element, axes, read, flat, self.settings)
        return with_body(func, [*flat.declarations(), *statements])


def _read_axis(element: Element, axes: list[Axis]) -> Axis | None:
    """Return the axis along which some input is contiguous, if it is not the written one."""
    if len(axes) < 2:
        return None
    written = axes[-1]
    if not (
        element.stage.indices[-1].same_as(written.var)
        and vectorizable(element.expressions, written.var)
        and moves_in_vectors(element)
        and _is_long(written)
    ):
        return None
    for expr in element.expressions:
        for load in loads_of(expr):
            for axis in axes[:-1]:
                uses_written = any(index.same_as(written.var) for index in load.indices)
                if uses_written and load.indices[-1].same_as(axis.var) and _is_long(axis):
                    return axis
    return None


def _is_long(axis: Axis) -> bool:
    extent = constant(axis.extent)
    return extent is None or extent >= _SHORTEST


def _emit(
    element: Element, axes: list[Axis], read: Axis, flat: FlatBuffers, settings: Settings
) -> list[Any]:
    rows_of_tile, columns_of_tile = settings.tile_rows, settings.lanes
    written = axes[-1]
    others = [[axis] for axis in axes[:-1] if axis is not read]
    extent = as_index(read.extent)
    tiles = Axis(
        tirx.Var("tile", str(read.var.ty.dtype)),
        (extent + (rows_of_tile - 1)) // rows_of_tile,
        False,
    )
    unit = unit_mapping(element.stage)

    def tile(mapping: dict[Any, Any]) -> list[Any]:
        first = as_index(mapping.pop(tiles.var)) * rows_of_tile
        count = tirx.min(index_const(rows_of_tile), extent - first)

        def rows(start: Any, lanes: int) -> Any:
            def row(index: Any) -> Any:
                here = {**unit, **mapping, **group_mapping([read], first + index)}
                body = lane_loops(
                    "column",
                    lanes,
                    lambda column: emit_element(
                        [element], flat, {**here, **group_mapping([written], start + column)}
                    ),
                )
                return sequence(body)

            return loop("row_of_tile", count, row)

        whole = as_index(written.extent) // columns_of_tile
        statements = [
            loop("columns", whole, lambda at: rows(at * columns_of_tile, columns_of_tile))
        ]
        columns = constant(written.extent)
        if columns is None:
            rest = as_index(written.extent) % columns_of_tile
            statements.append(
                loop("column", rest, lambda at: rows(whole * columns_of_tile + at, 1))
            )
        elif columns % columns_of_tile:  # eight heads are a vector, too
            statements.append(rows(whole * columns_of_tile, columns % columns_of_tile))
        return statements

    return emit_outer([*others, [tiles]], tile, True)
