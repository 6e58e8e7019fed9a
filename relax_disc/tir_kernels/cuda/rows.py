"""CUDA rule: reductions along rows and what follows them, one block of threads for each row.

Softmax, log-sum-exp, norms and their gradients, and sums of everything: threads of a warp add up by
shuffles, warps through shared memory, always in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import Element, collapse, substitute
from relax_disc.analysis.kernels.inplace import inplace_pairs
from relax_disc.analysis.kernels.stages import Axis, Stage, constant, loads_of, same_expr
from relax_disc.tir_kernels.binding import keep
from relax_disc.tir_kernels.cpu.elementwise import emit_element, unit_mapping
from relax_disc.tir_kernels.cpu.reductions import (
    RowKernel,
    bind_lets,
    emit_value,
    read_rows,
    reads_along,
)
from relax_disc.tir_kernels.cpu.rows import finished_stage, with_totals
from relax_disc.tir_kernels.cuda.split import split_long
from relax_disc.tir_kernels.cuda.threads import (
    WARP,
    at_groups,
    barrier,
    elements_count,
    launch,
    only_where,
)
from relax_disc.tir_kernels.cuda.vectors import (
    Body,
    Neighbours,
    for_each,
    integers_of,
    rolled,
    vectors_of,
)
from relax_disc.tir_kernels.flat import INDEX, FlatBuffers, index_const, product
from relax_disc.tir_kernels.hoist import hoist
from relax_disc.tir_kernels.loops import Scheduled, combine, loop, sequence, with_body

_MOST_THREADS = 512
_MOST_PARTS = 256  # of a row
_AT_ONCE = 4  # vectors that a thread waits for together: with more, some threads would spill


class Rows:
    """Schedule rule for row kernels."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when it is another rule's."""
        kernel = read_rows(func)
        if kernel is None or any(
            reads_along(element) == "column"
            for element in kernel.elements
            if element.stage.combiner is not None
        ):
            return None
        flat = FlatBuffers()
        overlaid = overlaid_inputs(func)
        most = _threads(kernel)
        expressions = [expr for element in kernel.elements for expr in element.expressions]
        stores = [[element.stage.buffer, *element.stage.indices] for element in kernel.elements]
        groups = collapse(kernel.rows, expressions, stores) if kernel.rows else []

        count = elements_count(groups)

        def grid(kernel: RowKernel, part: Any = None, parts: int = 1, totals: bool = False) -> Any:
            threads = WARP if totals else most

            def body(block: Any, thread: Any) -> list[Any]:
                at, own = part_of(block, parts)
                row = Row(kernel, overlaid, flat, thread, threads, part=own, parts=parts)

                def emit(mapping: dict[Any, Any]) -> list[Any]:
                    return row.emit(mapping if part is None else {**mapping, part: own})

                return at_groups(groups, at, "row", emit) if groups else emit({})

            return launch(count * parts, threads, body)

        launches, scratch = split_long(kernel, constant(count), most, _MOST_PARTS, grid)
        return with_body(func, [*flat.declarations(), *launches], scratch)


def part_of(block: Any, parts: int) -> tuple[Any, Any]:
    """Which block of an unsplit launch a block is a part of, and which part."""
    if parts == 1:
        return block, index_const(0)
    return block // parts, block % parts


def overlaid_inputs(func: tirx.PrimFunc) -> dict[Any, set[Any]]:
    """Map outputs of a kernel to the inputs that they may be written over."""
    found: dict[Any, set[Any]] = {}
    for source, target in inplace_pairs(func):
        found.setdefault(func.params[target], set()).add(func.params[source])
    return found


def _threads(kernel: RowKernel) -> int:
    """Threads for a row: four elements each, if there are as many; a power of two."""
    most = 1
    for element in kernel.elements:
        own = [axis for axis in element.stage.axes if axis not in kernel.rows]
        count = constant(product([axis.extent for axis in own]))
        most = max(most, count if count is not None else 4 * _MOST_THREADS)
    threads = WARP
    while threads < _MOST_THREADS and 4 * threads < most:
        threads *= 2
    return threads


class Row:
    """Makes the statements that one thread runs for one row.

    With ``width`` a block has that many rows side by side: a power of two up to 32, lanes of a
    warp, or one for each thread; ``is_row`` is the condition that a thread's row exists.  Of
    ``parts`` of the rows' elements it takes one.  With ``lanes`` each of these is so many rows that
    lie side by side, of which ``lane`` is one.
    ``overlaid``: by output, the inputs whose memory it may be.  Before it is written, all threads
    have read those.
    """

    def __init__(
        self,
        kernel: RowKernel,
        overlaid: Mapping[Any, set[Any]],
        flat: FlatBuffers,
        thread: Any,
        threads: int,
        width: int = 1,
        is_row: Any = None,
        part: Any = 0,
        parts: int = 1,
        lanes: int = 1,
    ) -> None:
        self.lane = index_const(0) if lanes == 1 else tirx.Var("lane", INDEX)
        self._lanes = lanes
        self._kernel, self._overlaid, self._flat = kernel, overlaid, flat
        self._thread, self._threads = thread, threads
        self._width, self._is_row = width, is_row
        # A row's threads take turns along it.
        self._turn = thread if width == 1 else tirx.FloorDiv(thread, index_const(width))
        self._turns = threads // width
        # Since the last barrier.
        self._read: set[Any] = set()
        self._written: set[Any] = set()
        self._has_met = False
        self._first, self._stride = part * self._turns + self._turn, parts * self._turns

    def emit(self, mapping: dict[Any, Any]) -> list[Any]:
        """Compute all stages; ``mapping`` gives the row."""
        statements: list[Any] = []
        mapping = dict(mapping)
        totals: dict[Any, Any] = {}
        outputs = set(self._kernel.kernel.outputs)
        for raws in self._together():
            elements = [with_totals(raw, totals) for raw in raws]
            reads = {
                load.source
                for element in elements
                for expr in element.expressions
                for load in loads_of(expr)
            }
            if reads & self._written:
                statements += self._meet()
            stage = elements[0].stage
            if stage.combiner is None and not self._is_one_number(elements[0]):
                # Here a thread alone reads the elements that it writes over.
                if self._read & self._overlaid.get(stage.buffer, set()):
                    statements += self._meet()
                statements += self._output(elements[0], mapping)
                self._read |= reads
                self._written.add(stage.buffer)
                continue
            self._read |= reads
            if stage.combiner is not None:
                made, found = self._reductions(elements, mapping)
            else:
                made, total = self._value(elements[0], {**unit_mapping(stage), **mapping})
                found = [total]
            statements += made
            for stage, total in zip((x.stage for x in elements), found, strict=True):
                var = tirx.Var(stage.name, str(total.ty.dtype))
                kept, mapping[var] = keep(stage.name, total) if self._lanes == 1 else ([], total)
                statements += kept
                totals[stage.buffer] = var
                if stage.buffer in outputs:
                    if self._read & self._overlaid.get(stage.buffer, set()):
                        statements += self._meet()
                    finished = Element(finished_stage(stage), (), var)
                    statements += self._output(finished, mapping)
        return statements

    def _together(self) -> list[list[Element]]:
        """List the stages; reductions one after another that need no other's total are walked once.

        What several of them read is then read once.
        """
        groups: list[list[Element]] = []
        for element in self._kernel.elements:
            made = {other.stage.buffer for other in groups[-1]} if groups else set()
            reads = {load.source for expr in element.expressions for load in loads_of(expr)}
            if groups and not reads & made and _walks_as(element.stage, groups[-1][0].stage):
                groups[-1].append(element)
            else:
                groups.append([element])
        return groups

    def _meet(self) -> list[Any]:
        """Wait for the other threads, unless each has a row of its own."""
        self._read, self._written = set(), set()
        return [barrier()] if self._turns > 1 else []

    def _is_one_number(self, element: Element) -> bool:
        """Whether an element-wise stage makes one number of a row, which all threads then keep."""
        stage = element.stage
        rows = {axis.var for axis in self._kernel.rows}
        has_own = any(x.var not in rows and constant(x.extent) != 1 for x in stage.axes)
        return not has_own and element.value.ty.dtype == stage.buffer.dtype

    def _each(self, mapping: dict[Any, Any], body: Callable[[Any], Sequence[Any]]) -> list[Any]:
        """Run ``body(flat)``, where ``mapping`` places axes, for the rows side by side."""
        if self._lanes == 1:
            return list(body(self._flat))
        places = integers_of(list(mapping.values()))
        neighbours = Neighbours(self._flat, places, self._lanes, self.lane, asks=False)
        return neighbours.around(body(neighbours))

    def _value(self, element: Element, mapping: dict[Any, Any]) -> tuple[list[Any], Any]:
        """Evaluate an element, for each of the rows side by side."""
        if self._lanes == 1:
            return emit_value(element, self._flat, mapping)
        dtype = str(element.value.ty.dtype)
        held = tirx.decl_buffer((self._lanes,), dtype, element.stage.name, scope="local")

        def body(flat: Any) -> list[Any]:
            statements, value = emit_value(element, flat, mapping)
            return [*statements, tirx.BufferStore(held, value, [self.lane])]

        statements = [tirx.AllocBuffer(held), *self._each(mapping, body)]
        return statements, tirx.BufferLoad(held, [self.lane])

    def _fixed(self, lets: Any, stage: Stage, mapping: dict[Any, Any]) -> list[Any]:
        """Evaluate what is fixed along a row, and enter what stands for it in ``mapping``."""
        if self._lanes == 1:
            return bind_lets(lets, self._flat, mapping)
        statements: list[Any] = []
        for var, expr in lets:
            made, mapping[var] = self._value(Element(stage, (), expr), mapping)
            statements += made
        return statements

    def _is_writer(self) -> Any:
        """Return the condition that a thread writes what is one number of a row."""
        is_first = tirx.EQ(self._turn, index_const(0))
        return is_first if self._is_row is None else tirx.And(is_first, self._is_row)

    def _spread(
        self, groups: Any, name: str, mapping: dict[Any, Any], body: Body, at_once: int = 1
    ) -> list[Any]:
        """Deal the elements of collapsed axes, at a row of ``mapping``, out to the threads.

        ``at_once``: of a thread, where it has rows side by side, elements that are read together.
        """
        count = elements_count(groups)

        def element(index: Any) -> list[Any]:
            if self._lanes == 1:
                return at_groups(groups, index, name, lambda at: body(self._flat, at))
            number = tirx.Var(name, INDEX)  # of which places are linear

            def rows(at: dict[Any, Any]) -> list[Any]:
                return self._each({**mapping, **at}, lambda flat: body(flat, at))

            return [tirx.Bind(number, index), *at_groups(groups, number, name, rows)]

        if self._lanes > 1:
            # Unrolled by nvcc, some spill; so they take 32 registers, and threads hide latency.
            if at_once == 1:
                return [rolled(self._in_turns(f"{name}_turn", count, element))]
            return self._few_at_once(f"{name}_turn", count, element, at_once)
        # Rows side by side are read by neighbouring threads.
        vectors = vectors_of(groups, self._flat, body, mapping) if self._width == 1 else None
        if vectors is None:
            return [self._in_turns(f"{name}_turn", count, element)]
        number, rest = vectors.count(count)
        done = number * vectors.lanes
        statements = [self._in_turns(f"{name}_vector", number, vectors.at)]
        if constant(rest) != 0:
            left = self._in_turns(f"{name}_turn", rest, lambda at: element(done + at))
            statements.append(rolled(left))
        return statements

    def _in_turns(self, name: str, count: Any, body: Callable[[Any], list[Any]]) -> Any:
        """Run ``body`` for so many numbers, of which each thread has every so-manieth."""
        exact = constant(count)

        def at(turn: Any) -> Any:
            index = turn * self._stride + self._first
            if exact is not None and exact % self._stride == 0:
                return sequence(body(index))
            return only_where(index < count, body(index))

        return loop(name, (count + (self._stride - 1)) // self._stride, at)

    def _few_at_once(
        self, name: str, count: Any, body: Callable[[Any], list[Any]], most: int
    ) -> list[Any]:
        """Run as `_in_turns`, in the same order, but read some turns' operands together."""
        whole = count // (most * self._stride)

        def some(turn: Any) -> Any:
            k = tirx.Var("k", INDEX)
            return for_each(k, most, body((turn * most + k) * self._stride + self._first))

        def one(turn: Any) -> Any:
            index = (whole * most + turn) * self._stride + self._first
            return only_where(index < count, body(index))

        rest = (count + (self._stride - 1)) // self._stride - whole * most
        return [rolled(loop(f"{name}s", whole, some)), rolled(loop(name, rest, one))]

    def _output(self, element: Element, mapping: dict[Any, Any]) -> list[Any]:
        stage = element.stage
        mapping = {**unit_mapping(stage), **mapping}
        axes = [axis for axis in stage.axes if axis.var not in mapping]
        if not axes:
            stores = self._each(mapping, lambda flat: [emit_element([element], flat, mapping)])
            return [only_where(self._is_writer(), stores)]
        fixed, (element,) = hoist([element], {axis.var for axis in axes})
        binds = bind_lets(fixed, self._flat, mapping)
        groups = collapse(axes, element.expressions, [[stage.buffer, *stage.indices]])

        def body(flat: Any, position: dict[Any, Any]) -> list[Any]:
            return [emit_element([element], flat, {**mapping, **position})]

        return [*binds, *self._spread(groups, "column", mapping, body)]

    def _reductions(
        self, elements: Sequence[Element], mapping: dict[Any, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Reduce along the row, in one walk; return statements and the totals."""
        stages = [element.stage for element in elements]
        axes = _walked(stages[0])
        mapping = dict(mapping)
        for stage in stages:
            mapping.update(unit_mapping(stage))
        fixed, elements = hoist([_along(e, axes) for e in elements], {axis.var for axis in axes})
        statements = self._fixed(fixed, stages[0], mapping)
        at, owns = [self.lane], []
        for stage in stages:
            dtype, name = str(stage.init.ty.dtype), f"{stage.name}_own"
            own = tirx.decl_buffer((self._lanes,), dtype, name, scope="local")
            start = self._alone([tirx.BufferStore(own, stage.init, at)])
            statements += [tirx.AllocBuffer(own), *start]
            owns.append(own)

        def add(stage: Stage, own: Any, value: Any) -> Any:
            assert stage.combiner is not None
            total = combine(stage.combiner, tirx.BufferLoad(own, at), value)
            return tirx.BufferStore(own, total, at)

        def body(flat: Any, position: dict[Any, Any]) -> list[Any]:
            made: list[Any] = []
            for element, stage, own in zip(elements, stages, owns, strict=True):
                steps, value = emit_value(element, flat, {**mapping, **position})
                made += [*steps, add(stage, own, value)]
            return made

        totals = [tirx.BufferLoad(own, at) for own in owns]
        if not axes:
            return [*statements, *self._each(mapping, lambda flat: body(flat, {}))], totals
        expressions = [expr for element in elements for expr in element.expressions]
        groups = collapse(axes, expressions, [])
        reads = {load.source for expr in expressions for load in loads_of(expr)}
        at_once = max(1, _AT_ONCE // max(1, len(reads)))
        statements += self._spread(groups, stages[0].name, mapping, body, at_once)
        for stage, own in zip(stages, owns, strict=True):
            statements += self._add_up(own, stage, partial(add, stage, own))
        return statements, totals

    def _alone(self, statements: list[Any]) -> list[Any]:
        """Run statements that touch no operand for the rows side by side."""
        return statements if self._lanes == 1 else [for_each(self.lane, self._lanes, statements)]

    def _add_up(self, own: Any, stage: Stage, add: Callable[[Any], Any]) -> list[Any]:
        """Leave in ``own`` of a row's threads the total over them, ``add`` adding to it."""
        if self._turns == 1:
            return []
        dtype, zero, width, lanes = str(own.dtype), index_const(0), self._width, self._lanes
        mine = tirx.BufferLoad(own, [self.lane])
        statements: list[Any] = []
        for distance in (16, 8, 4, 2, 1):
            if distance >= width:
                # The exclusive or gives all lanes the total, so that nobody has to be told.
                statements += self._alone([add(self._from_lane(mine, distance, dtype))])
        if self._threads == WARP:
            return statements
        warps = self._threads // WARP
        size = warps * width * lanes
        by_warps = tirx.decl_buffer((size,), dtype, f"{stage.name}_warps", scope="shared")
        thread = tirx.FloorMod(self._thread, index_const(WARP))
        row = zero if width == 1 else tirx.FloorMod(self._thread, index_const(width))
        warp = tirx.FloorDiv(self._thread, index_const(WARP))

        def place(warp: Any) -> list[Any]:
            return [(warp * width + row) * lanes + self.lane]

        store = self._alone([tirx.BufferStore(by_warps, mine, place(warp))])
        totals = [tirx.BufferLoad(by_warps, place(index_const(w))) for w in range(warps)]
        # TVM lets totals share memory, and fails to part them in a launch that the host chooses.
        before = self._meet() if self._has_met else []
        self._has_met = True
        first = tirx.BufferStore(own, totals[0], [self.lane])
        return [
            *statements,
            tirx.AllocBuffer(by_warps),
            *before,
            *(store if width == WARP else [only_where(thread < width, store)]),
            *self._meet(),
            *self._alone([first, *map(add, totals[1:])]),
        ]

    def _from_lane(self, value: Any, distance: int, dtype: str) -> Any:
        """Ask the lane whose number differs in one bit for its value."""
        mask = tirx.call_intrin("uint32", "tirx.tvm_warp_activemask")
        target, name = Target.current(allow_none=True), "tirx.tvm_warp_shuffle_xor"
        if target is not None and target.kind.name != "cuda":  # TVM has no other for LLVM's
            lane = tirx.FloorMod(self._thread, index_const(WARP)).astype("int32")
            name, distance = "tirx.tvm_warp_shuffle", tirx.bitwise_xor(lane, distance)
        return tirx.call_intrin(dtype, name, mask, value, distance, WARP, WARP)


def _walked(stage: Stage) -> list[Axis]:
    return [axis for axis in stage.reduced if constant(axis.extent) != 1]


def _walks_as(stage: Stage, other: Stage) -> bool:
    """Whether two stages are reductions over as many elements, axis by axis."""
    if stage.combiner is None or other.combiner is None:
        return False
    extents, others = ([axis.extent for axis in _walked(each)] for each in (stage, other))
    return len(extents) == len(others) and all(map(same_expr, extents, others))


def _along(element: Element, axes: Sequence[Axis]) -> Element:
    """Name the axes that a reduction walks as those of another."""
    own = _walked(element.stage)
    renamed = {mine.var: axis.var for mine, axis in zip(own, axes, strict=True)}
    lets = tuple((var, substitute(expr, renamed)) for var, expr in element.lets)
    return Element(element.stage, lets, substitute(element.value, renamed))
