"""CPU rule: sums down columns (bias and norm gradients), where memory is contiguous across them.

A tile of neighbouring columns is accumulated in registers while the rows stream by.  Few columns
would occupy few threads, so then the rows are cut into a fixed number of chunks, each with its
partial sums: fixed, because the order of a sum must not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import Element, collapse
from relax_disc.analysis.kernels.stages import Axis, constant
from relax_disc.tir_kernels.binding import keep
from relax_disc.tir_kernels.cpu.elementwise import emit_element, emit_outer, unit_mapping
from relax_disc.tir_kernels.cpu.reductions import RowKernel, emit_value, read_rows, reads_along
from relax_disc.tir_kernels.cpu.rows import finished_stage, with_totals
from relax_disc.tir_kernels.flat import FlatBuffers, as_index, index_const, product
from relax_disc.tir_kernels.loops import (
    LANES,
    Accumulator,
    Scheduled,
    Settings,
    TunedRule,
    decode,
    group_extent,
    group_mapping,
    lane_loops,
    loop,
    sequence,
    with_body,
)
from relax_disc.tir_kernels.vectorizable import moves_in_vectors, vectorizable

# Chunks of rows when there are few columns; also the most threads that can help then.
CHUNKS = 16
# More columns than this are enough tiles for every thread without chunks (and their workspace).
MOST_CHUNKED_COLUMNS = 4096
_FEWEST_CHUNKED_ROWS = 64


class Columns(TunedRule):
    """Schedule rule for one reduction down columns and what is computed from its result."""

    tunes = ("lanes", "tile_columns")

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when it is another rule's."""
        kernel = read_rows(func)
        if kernel is None:
            return None
        first, *rest = kernel.elements
        if first.stage.combiner is None or reads_along(first) != "column":
            return None
        count = len(kernel.rows)
        if any(
            element.stage.combiner is not None or len(_large(element)) != count for element in rest
        ):
            return None
        emitter = _Emitter(kernel, self.settings)
        statements = emitter.emit()
        return with_body(func, [*emitter.flat.declarations(), *statements], emitter.scratch)


def _large(element: Element) -> list[Axis]:
    return [axis for axis in element.stage.axes if constant(axis.extent) != 1]


class _Emitter:
    """Makes the loops of one column kernel."""

    def __init__(self, kernel: RowKernel, settings: Settings) -> None:
        self.kernel = kernel
        self.settings = settings
        self.flat = FlatBuffers(bits=True)
        self.scratch: list[Any] = []
        self.first = kernel.elements[0]
        expressions = [expr for element in kernel.elements for expr in element.expressions]
        stores = [[e.stage.buffer, *e.stage.indices] for e in kernel.elements]
        *self.outer, self.columns = collapse(kernel.rows, expressions, stores)
        reduced = [axis for axis in self.first.stage.reduced if constant(axis.extent) != 1]
        self.reduced = collapse(reduced, self.first.expressions, []) if reduced else []
        self.unit = {}
        for element in kernel.elements:
            self.unit.update(unit_mapping(element.stage))
        self.vector = all(
            vectorizable(element.expressions, self.columns[-1].var) and moves_in_vectors(element)
            for element in kernel.elements
        )

    def emit(self) -> list[Any]:
        columns = constant(product([axis.extent for axis in self.kernel.rows]))
        rows = constant(product([group_extent(group) for group in self.reduced]))
        few = columns is not None and columns <= MOST_CHUNKED_COLUMNS and not self.outer
        if few and self.reduced and (rows is None or rows >= _FEWEST_CHUNKED_ROWS):
            return self._emit_chunked(columns or 0)
        return emit_outer(self.outer, self._emit_tiles, not self._tiles_are_parallel())

    def _tiles_are_parallel(self) -> bool:
        """Spread the tiles, rather than what is outside of them, over the threads."""
        outer = constant(product([group_extent(group) for group in self.outer]))
        return outer is not None and outer < CHUNKS

    def _emit_tiles(self, mapping: dict[Any, Any]) -> list[Any]:
        """Sum all rows, tile by tile."""
        extent = group_extent(self.columns)
        kind = tirx.ForKind.PARALLEL if self._tiles_are_parallel() else tirx.ForKind.SERIAL

        def tile(base: Any, width: int) -> Any:
            total = self._new_total(width)
            body = self._sum_rows(total, mapping, base, width)
            write = lane_loops(
                "lane",
                width,
                lambda lane: self._write(
                    {**mapping, **group_mapping(self.columns, base + lane)}, total.at(lane)
                ),
            )
            return sequence([*total.start(), body, *write])

        if not self.vector:
            return [loop("column", extent, lambda column: tile(column, 1), kind)]
        statements: list[Any] = []
        count, tiled = constant(extent), self.settings.tile_columns
        if count is not None:
            return self._tiled(count, tiled, tile, kind)
        # Each pass over the rows takes as many columns as are left: whole tiles, vectors, single.
        done: Any = index_const(0)
        for width in (tiled, LANES, 1):
            tiles = (as_index(extent) - done) // width
            statements.append(
                loop(
                    f"tile_{width}",
                    tiles,
                    lambda at, done=done, width=width: tile(done + at * width, width),
                    kind,
                )
            )
            done = done + tiles * width
        return statements

    def _emit_chunked(self, columns: int) -> list[Any]:
        """Sum chunks of the rows in parallel, then the partial sums."""
        stage = self.first.stage
        rows = product([group_extent(group) for group in self.reduced])
        step = (rows + (CHUNKS - 1)) // CHUNKS
        partial = tirx.decl_buffer(
            (CHUNKS * columns,), str(stage.init.ty.dtype), f"{stage.name}_partial"
        )
        self.scratch.append(partial)

        def chunk(index: Any) -> Any:
            start = index * step
            count = tirx.max(tirx.min(step, rows - start), index_const(0))

            def tile(base: Any, width: int) -> Any:
                total = self._new_total(width)
                body = self._sum_rows(total, {}, base, width, start, count)
                keep = lane_loops(
                    "lane",
                    width,
                    lambda lane: tirx.BufferStore(
                        partial, total.at(lane), [index * columns + base + lane]
                    ),
                )
                return sequence([*total.start(), body, *keep])

            return sequence(self._tiled(columns, self.settings.tile_columns, tile))

        def finish(base: Any, width: int) -> Any:
            """Sum the partial sums of a tile, in the order of the chunks, and write the results."""
            total = self._new_total(width)

            def part(index: Any, lane: Any) -> Any:
                return tirx.BufferLoad(partial, [index * columns + base + lane])

            first = lane_loops("lane", width, lambda lane: total.set(lane, part(0, lane)))
            others = loop(
                "part",
                index_const(CHUNKS - 1),
                lambda k: sequence(
                    lane_loops("lane", width, lambda lane: total.add(lane, part(k + 1, lane)))
                ),
            )
            write = lane_loops(
                "lane",
                width,
                lambda lane: self._write(group_mapping(self.columns, base + lane), total.at(lane)),
            )
            return sequence([tirx.AllocBuffer(total.buffer), *first, others, *write])

        return [
            loop("chunk", index_const(CHUNKS), chunk, tirx.ForKind.PARALLEL),
            *self._tiled(columns, self.settings.lanes, finish),
        ]

    def _tiled(
        self,
        columns: int,
        width: int,
        tile: Callable[[Any, int], Any],
        kind: tirx.ForKind = tirx.ForKind.SERIAL,
    ) -> list[Any]:
        """Make ``tile(first column, width)`` for all columns; the last may be narrower."""
        width = width if self.vector else 1
        rest = columns % width
        whole = loop(
            "tile", index_const(columns // width), lambda at: tile(at * width, width), kind
        )
        return [whole, *([tile(index_const(columns - rest), rest)] if rest else [])]

    def _new_total(self, width: int) -> Accumulator:
        stage = self.first.stage
        return Accumulator(f"{stage.name}_total", stage.combiner or "add", stage.init, width)

    def _sum_rows(
        self,
        total: Accumulator,
        mapping: dict[Any, Any],
        base: Any,
        width: int,
        start: Any = None,
        count: Any = None,
    ) -> Any:
        """Accumulate ``width`` columns from ``base`` over all rows, or ``count`` from ``start``."""
        extents = [group_extent(group) for group in self.reduced]

        def row(position: dict[Any, Any]) -> Any:
            def add(lane: Any) -> Any:
                columns = group_mapping(self.columns, base + lane)
                statements, value = emit_value(
                    self.first, self.flat, {**self.unit, **mapping, **position, **columns}
                )
                return sequence([*statements, total.add(lane, value)])

            return sequence(lane_loops("lane", width, add))

        def nest(level: int, position: dict[Any, Any]) -> Any:
            if level == len(self.reduced):
                return row(position)
            return loop(
                f"row_{level}",
                extents[level],
                lambda index: nest(
                    level + 1, {**position, **group_mapping(self.reduced[level], index)}
                ),
            )

        if start is None:
            return nest(0, {})

        def fused(index: Any) -> Any:
            statements, indices = decode(start + index, extents, "row")
            position: dict[Any, Any] = {}
            for group, at in zip(self.reduced, indices, strict=True):
                position.update(group_mapping(group, at))
            return sequence([*statements, row(position)])

        return loop("row", count, fused)

    def _write(self, mapping: dict[Any, Any], total: Any) -> Any:
        """Write what is computed from the finished sum of one column."""
        stage = self.first.stage
        mapping = {**self.unit, **mapping}
        var = tirx.Var(stage.name, str(total.ty.dtype))
        statements, mapping[var] = keep(stage.name, total)
        if stage.buffer in self.kernel.kernel.outputs:
            result = Element(finished_stage(stage), (), var)
            statements.append(emit_element([result], self.flat, mapping))
        for element in self.kernel.elements[1:]:
            element = with_totals(element, {stage.buffer: var})
            statements.append(emit_element([element], self.flat, mapping))
        return sequence(statements)
