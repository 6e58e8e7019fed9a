"""Build loops: vectors with a scalar rest, parallel rows, accumulators in vector lanes.

The vectors are explicit.  A compiler may only vectorise a loop by itself when it can prove (or
check) that outputs and inputs do not overlap, and kernels that run in place overlap fully.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import s_tir, tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.stages import Axis, Combiner, constant
from relax_disc.tir_kernels.flat import INDEX, STACK, as_index, index_const, product

# One AVX-512 register of float32; narrower machines split it in two or four.
LANES = 16
# LLVM fills narrower vectors up to a register, and others to a power of two. What it loads for the
# lanes that nobody asked for, if it may for alignment, can be subnormal: arithmetic with such
# garbage took 25 times as long, in those processes whose allocator left some behind a bias.
_LEAST_LANES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Numbers of the rules that change a kernel's speed alone, or the order of its sums.

    ``lanes``: elements of a vector of an element-wise loop. ``reduction_lanes``: partial totals of
    a sum along a row. Two registers hide the latency of an addition; more spill when exponentials
    are inlined. ``tile_rows``: rows of a transpose that share what was read: two cache lines of
    float32. Sixteen lanes of them are 2 KiB. ``tile_columns``: columns that are summed at a time.
    Four AVX-512 registers: 256 bytes of a row, what one prefetch stream likes.
    """

    lanes: int = LANES
    reduction_lanes: int = 32
    tile_rows: int = 32
    tile_columns: int = 64


DEFAULTS = Settings()

Scheduled: TypeAlias = "s_tir.Schedule | None"
"""What a rule makes of a kernel."""


class TunedRule:
    """A schedule rule that goes by some settings, those that ``tunes`` names."""

    tunes: tuple[str, ...]

    def __init__(self, settings: Settings = DEFAULTS) -> None:
        self.settings = settings


Body = Callable[[Any], Any]


def loop(name: str, extent: Any, body: Body, kind: tirx.ForKind = tirx.ForKind.SERIAL) -> Any:
    """Make ``for name in range(extent): body(name)``; extents 0 and 1 need no loop."""
    count = constant(extent)
    if count == 0:
        return tirx.Evaluate(index_const(0))
    if count == 1 and kind != tirx.ForKind.PARALLEL:
        return body(index_const(0))
    var = tirx.Var(name, INDEX)
    return tirx.For(var, index_const(0), as_index(extent), kind, body(var))


def sequence(statements: Sequence[Any]) -> Any:
    """Join statements, flattening nested sequences."""
    flat: list[Any] = []
    for statement in statements:
        flat.extend(statement.seq if isinstance(statement, tirx.SeqStmt) else [statement])
    return flat[0] if len(flat) == 1 else tirx.SeqStmt(flat)


def vector_loop(
    name: str, extent: Any, body: Body, *, lanes: int = LANES, parallel: bool = False
) -> list[Any]:
    """Run ``body`` for every index in vectors of ``lanes``, and the rest one by one.

    ``extent``: number of elements, constant or symbolic. ``body``: maps an index to a statement;
    called anew for each loop that is made. ``lanes``: elements a vector. ``parallel``: spread the
    vectors over the threads.
    """
    kind = tirx.ForKind.PARALLEL if parallel else tirx.ForKind.SERIAL
    count = constant(extent)
    whole = extent // lanes if count is None else index_const(count // lanes)
    statements = []
    if count is None or count >= lanes:

        def vector(start: Any) -> Any:
            return loop(
                f"{name}_lane",
                index_const(lanes),
                lambda lane: body(start * lanes + lane),
                tirx.ForKind.VECTORIZED,
            )

        statements.append(loop(f"{name}_vector", whole, vector, kind))
    if count is None:
        rest = as_index(extent) % lanes
        base = whole * lanes
        statements.append(loop(f"{name}_rest", rest, lambda index: body(base + index)))
    elif count % lanes:
        base = index_const(count - count % lanes)
        statements += lane_loops(f"{name}_rest", count % lanes, lambda index: body(base + index))
    return statements


def lane_loops(name: str, count: int, body: Body) -> list[Any]:
    """Run ``body`` for every index below ``count`` in vectors of 4, 8, 16, ... lanes, each once.

    At most three indices are left, which are single.
    """
    statements, done = [], 0
    while count - done >= _LEAST_LANES:
        width, start = 1 << (count - done).bit_length() - 1, index_const(done)
        statements.append(
            loop(
                name,
                index_const(width),
                lambda lane, start=start: body(start + lane),
                tirx.ForKind.VECTORIZED,
            )
        )
        done += width
    return [*statements, *(body(index_const(index)) for index in range(done, count))]


def decode(index: Any, extents: Sequence[Any], name: str) -> tuple[list[Any], list[Any]]:
    """Split a fused index into one for each extent.

    ``statements``, ``indices``: the statements bind the variables that the indices are.
    """
    if len(extents) == 1:
        return [], [index]
    statements: list[Any] = []
    indices: list[Any] = []
    for position, extent in enumerate(reversed(extents)):
        last = position == len(extents) - 1
        var = tirx.Var(f"{name}_{len(extents) - 1 - position}", INDEX)
        statements.append(tirx.Bind(var, index if last else index % as_index(extent)))
        indices.append(var)
        if not last:
            index = index // as_index(extent)
    return statements, indices[::-1]


def group_extent(group: Sequence[Axis]) -> Any:
    """Number of iterations of axes that were collapsed into one."""
    return product([axis.extent for axis in group])


def group_mapping(group: Sequence[Axis], index: Any) -> dict[Any, Any]:
    """Map collapsed axes to one index: the last takes it, the others are 0."""
    mapping = {axis.var: prim.IntImm(str(axis.var.ty.dtype), 0) for axis in group[:-1]}
    mapping[group[-1].var] = narrow(index, group[-1].var)
    return mapping


def narrow(index: Any, like: Any) -> Any:
    """Cast an index to the type of the axis that it replaces."""
    dtype = str(like.ty.dtype)
    return index if str(index.ty.dtype) == dtype else tirx.Cast(dtype, index)


def combine(combiner: Combiner, left: Any, right: Any) -> Any:
    """Apply a combiner to two values."""
    if combiner == "add":
        return left + right
    if combiner == "mul":
        return left * right
    return tirx.max(left, right) if combiner == "max" else tirx.min(left, right)


# A sum of 400 000 terms in float32 is off by 3e-5; in float64 it is rounded once.  The terms
# are still computed in float32, and steps take 0 to 2% longer (a small ResNet, GPT-2, MobileNet).
_SUMMED_IN = {"float32": "float64"}


def widened(combiner: Combiner, value: Any) -> Any:
    """Convert a term or partial result to the type in which it is accumulated."""
    dtype = str(value.ty.dtype)
    wide = _SUMMED_IN.get(dtype, dtype) if combiner == "add" else dtype
    return value if wide == dtype else tirx.Cast(wide, value)


class Accumulator:
    """A running total kept in vector lanes, so that the order of summation is fixed here.

    ``combiner``: what is accumulated. ``init``: its neutral element. ``lanes``: independent partial
    totals.
    """

    def __init__(self, name: str, combiner: Combiner, init: Any, lanes: int) -> None:
        self.combiner: Combiner = combiner
        self.init = widened(combiner, init)
        self.dtype = str(init.ty.dtype)
        self.lanes = lanes
        self.buffer = tirx.decl_buffer((lanes,), str(self.init.ty.dtype), name, scope=STACK)

    def start(self) -> list[Any]:
        """Allocate the lanes and set them to the neutral element."""
        return [
            tirx.AllocBuffer(self.buffer),
            *lane_loops(
                "lane",
                self.lanes,
                lambda lane: tirx.BufferStore(self.buffer, self.init, [lane]),
            ),
        ]

    def set(self, lane: Any, value: Any) -> Any:
        """Begin a lane with a value in place of the neutral element."""
        return tirx.BufferStore(self.buffer, widened(self.combiner, value), [lane])

    def add(self, lane: Any, value: Any) -> Any:
        """Accumulate one value in one lane."""
        total = tirx.BufferLoad(self.buffer, [lane])
        value = widened(self.combiner, value)
        return tirx.BufferStore(self.buffer, combine(self.combiner, total, value), [lane])

    def loops(self, name: str, extent: Any, body: Callable[[Any], tuple[list[Any], Any]]) -> Any:
        """Accumulate ``body(index)``, statements and a value, for every index."""

        def step(index: Any, lane: Any) -> Any:
            statements, value = body(index)
            return sequence([*statements, self.add(lane, value)])

        zero = index_const(0)
        count = constant(extent)
        if self.lanes == 1 or (count is not None and count < self.lanes):
            return loop(name, extent, lambda index: step(index, zero))
        lanes = self.lanes
        whole = as_index(extent) // lanes if count is None else index_const(count // lanes)
        rest = as_index(extent) % lanes if count is None else index_const(count % lanes)

        def vector(start: Any) -> Any:
            return loop(
                f"{name}_lane",
                index_const(lanes),
                lambda lane: step(start * lanes + lane, lane),
                tirx.ForKind.VECTORIZED,
            )

        base = whole * lanes
        return sequence(
            [
                loop(f"{name}_vector", whole, vector),
                loop(f"{name}_rest", rest, lambda index: step(base + index, zero)),
            ]
        )

    def finish(self) -> list[Any]:
        """Combine the lanes, pairwise halves first, into lane 0."""
        statements = []
        width = self.lanes
        while width > 1:
            width //= 2
            half = index_const(width)

            def fold(lane: Any, half: Any = half) -> Any:
                return self.add(lane, tirx.BufferLoad(self.buffer, [lane + half]))

            statements.append(loop("lane", half, fold, tirx.ForKind.VECTORIZED))
        return statements

    def at(self, lane: Any) -> Any:
        """Read the total of one lane, rounded to the type of the result."""
        total = tirx.BufferLoad(self.buffer, [lane])
        return total if str(total.ty.dtype) == self.dtype else tirx.Cast(self.dtype, total)

    def total(self) -> Any:
        """Read the finished total."""
        return self.at(index_const(0))


def with_body(
    func: tirx.PrimFunc, statements: Sequence[Any], scratch: Sequence[Any] = ()
) -> s_tir.Schedule:
    """Give a function a new body of plain loops and wrap it as a schedule.

    ``statements``: the body. ``scratch``: allocated for the whole of the body, where
    `HoistWorkspace` finds them.
    """
    body = sequence(statements)
    block = s_tir.SBlock([], [], [], "root", body, alloc_buffers=list(scratch))
    body = s_tir.SBlockRealize([], True, block)
    return s_tir.Schedule(func.with_body(body))
