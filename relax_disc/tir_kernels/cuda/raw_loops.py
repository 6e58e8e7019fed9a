"""CUDA rule: raw loops (scatters, cumulative sums) spread over threads as far as nothing conflicts.

Iterations of owned loops (`relax_disc.tir_kernels.nests`) are threads; the others are walked.  Of
scatters that walk far, warps own destinations besides: each looks at the positions of all
writes, 32 at a time, and makes those that are its own, in order.  So nothing is atomic, and the
result is that of the loops, to the last bit.  Sums along the last axis are scans of a warp instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.ir import prim
from tvm.target import Target

from relax_disc.analysis.kernels.element import is_guard, substitute
from relax_disc.analysis.kernels.races import APART_ATTRIBUTE
from relax_disc.analysis.kernels.stages import constant, loads_of, same_expr
from relax_disc.tir_kernels.cuda.threads import WARP, hold, launch, only_where, shuffle, split
from relax_disc.tir_kernels.cuda.vectors import Neighbours
from relax_disc.tir_kernels.flat import INDEX, FlatBuffers, index_const, product
from relax_disc.tir_kernels.loops import Scheduled, loop, narrow, sequence, with_body
from relax_disc.tir_kernels.nests import Nest, read_nests
from relax_disc.tir_kernels.vectorizable import uses_any

_THREADS = 256
_BYTES = 16  # of the widest load
_SHORT = 32  # steps that a thread walks alone
_WARPS = 4096  # of a scatter, where it has as many destinations: what a large device keeps busy
_SLOTS = 512  # of a place's owners: with more each would look for longer than it writes
_ALL = 0xFFFFFFFF  # lanes
_SCANNED = ("float32", "float64", "int32", "int64")


class RawLoops:
    """Schedule rule for kernels outside of block form."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when two iterations may touch the same.

        That launches touch the same only in their order follows from which loops are owned.
        """
        nests = read_nests(func)
        if nests is None:
            return None
        flat = FlatBuffers()
        launches = [_launch(nest, flat, target.kind.name == "cuda") for nest in nests]
        if any(made is None for made in launches):
            return None
        return with_body(func.with_attr(APART_ATTRIBUTE, True), [*flat.declarations(), *launches])


def _statement(nest: Nest, mapping: dict[Any, Any]) -> Any:
    """Make the store, with other variables for those of the loops."""
    store = nest.store
    indices = [substitute(index, mapping) for index in store.indices]
    made = tirx.BufferStore(store.buffer, substitute(store.value, mapping), indices)
    return only_where(_all(nest.conditions, mapping), [made]) if nest.conditions else made


def _all(conditions: Sequence[Any], mapping: dict[Any, Any]) -> Any:
    first, *rest = (substitute(condition, mapping) for condition in conditions)
    return tirx.all(first, *rest) if rest else first


def _launch(nest: Nest, flat: FlatBuffers, has_votes: bool) -> Any:
    """Make a launch; without votes of a warp (ROCm) threads walk alone."""
    buffer, owned, walked = nest.store.buffer, nest.owned, nest.walked
    steps = constant(product([x.extent for x in walked]))
    own = list(nest.store.indices)
    if not has_votes:
        return _each_a_thread(nest, owned, walked)
    if all(all(map(_is_same, place, own)) for place in nest.reads_of(buffer)):
        if steps is None or steps > _SHORT:
            return _scatter(nest, flat, owned, walked)
    elif (scan := _read_scan(nest, walked)) is not None:
        return _scan(nest, owned, *scan)
    return _each_a_thread(nest, owned, walked)


def _is_same(left: Any, right: Any) -> bool:
    """Whether two indices are equal but for the order of what is added, which TVM changes."""
    if same_expr(left, right):
        return True
    if isinstance(left, prim.Select) and isinstance(right, prim.Select):
        left = [left.condition, left.true_value, left.false_value]
        right = [right.condition, right.true_value, right.false_value]
        return all(map(_is_same, left, right))
    if isinstance(left, prim.Add) and isinstance(right, prim.Add):
        straight = _is_same(left.a, right.a) and _is_same(left.b, right.b)
        return straight or (_is_same(left.a, right.b) and _is_same(left.b, right.a))
    return False


def _places(loops: Sequence[Any], index: Any) -> dict[Any, Any]:
    """Map the variables of loops to what they are at a flat index of all their iterations."""
    places = split(index, [x.extent for x in loops])
    return {x.loop_var: narrow(at, x.loop_var) for x, at in zip(loops, places, strict=True)}


def _count(loops: Sequence[Any]) -> Any:
    return product([x.extent for x in loops])


def _each_a_thread(nest: Nest, owned: Sequence[Any], walked: Sequence[Any]) -> Any:
    """Let a thread walk for each iteration of the owned loops."""
    count = _count(owned)

    def body(block: Any, thread: Any) -> list[Any]:
        index = block * _THREADS + thread
        held, mapping = hold(_places(owned, index)) if walked else ([], _places(owned, index))

        def step(at: Any) -> Any:
            return _statement(nest, {**mapping, **_places(walked, at)})

        return [only_where(index < count, [*held, loop("step", _count(walked), step)])]

    return launch((count + (_THREADS - 1)) // _THREADS, _THREADS, body)


def _scatter(nest: Nest, flat: FlatBuffers, owned: Sequence[Any], walked: Sequence[Any]) -> Any:
    """Let warps own destinations; lanes look for writes to those, then are columns of each.

    A lane has the columns of 16 bytes where they are aligned, so that fewer warps look.
    """
    store = nest.store
    variables = {x.loop_var for x in owned}
    looked_up = [
        (index, extent)
        for index, extent in zip(store.indices, store.buffer.shape, strict=True)
        if not any(index.same_as(var) for var in variables)
    ]
    keys = [*(index for index, _ in looked_up), *nest.conditions]
    columns = [x for x in owned if not uses_any(keys, {x.loop_var})]
    groups = [x for x in owned if x not in columns]
    width = _count(columns)
    lanes = _side_by_side(nest, columns)
    width = width // lanes
    chunks = (width + (WARP - 1)) // WARP
    most = tirx.max(index_const(_WARPS) // tirx.max(_count(groups) * chunks, 1), 1)
    slots = tirx.min(tirx.min(most, _SLOTS), product([extent for _, extent in looked_up]))
    parts = [_count(groups), slots] if _has_last(groups, store) else [slots, _count(groups)]
    units = product([*parts, chunks])
    steps = _count(walked)
    warps = _THREADS // WARP

    def body(block: Any, thread: Any) -> list[Any]:
        unit = block * warps + tirx.FloorDiv(thread, index_const(WARP))
        lane = tirx.FloorMod(thread, index_const(WARP))
        chunk, *rest = split(unit, [chunks, *reversed(parts)])
        group, slot = rest[::-1] if _has_last(groups, store) else rest
        named = {"slot": slot, "column": chunk * WARP + lane, **_places(groups, group)}
        held, mapping = hold(named)
        slot, column = mapping.pop("slot"), mapping.pop("column")
        found = tirx.decl_buffer((1,), "uint32", "found", scope="local")
        left = tirx.BufferLoad(found, [index_const(0)])

        def look(turn: Any) -> Any:
            at = turn * WARP + lane
            places = {**mapping, **_places(walked, at)}
            key: Any = index_const(0)
            for index, extent in looked_up:
                key = key * extent + substitute(index, places)
            slots32 = tirx.Cast("uint32", slots)
            is_own = tirx.EQ(tirx.Cast("uint32", key) % slots32, tirx.Cast("uint32", slot))
            if nest.conditions:
                is_own = tirx.if_then_else(_all(nest.conditions, places), is_own, False)
            is_own = tirx.if_then_else(at < steps, is_own, False)
            mine = tirx.call_extern("uint32", "__ballot_sync", tirx.const(_ALL, "uint32"), is_own)
            first = tirx.call_extern("int32", "__ffs", tirx.Cast("int32", left))
            hit = tirx.Var("hit", "int64")
            there = {**mapping, **_places(walked, turn * WARP + hit)}
            if lanes == 1:
                write = [_statement(nest, {**there, **_places(columns, column)})]
            else:
                write = _vector(nest, flat, there, columns, column, lanes)
            make = [
                tirx.Bind(hit, tirx.Cast("int64", first) - 1),
                tirx.BufferStore(found, left & (left - tirx.const(1, "uint32")), [index_const(0)]),
                only_where(column < width, write),
            ]
            return sequence(
                [
                    tirx.BufferStore(found, mine, [index_const(0)]),
                    tirx.While(tirx.NE(left, tirx.const(0, "uint32")), sequence(make)),
                ]
            )

        search = loop("turn", (steps + (WARP - 1)) // WARP, look)
        return [only_where(unit < units, [*held, tirx.AllocBuffer(found), search])]

    return launch((units + (warps - 1)) // warps, _THREADS, body)


def _side_by_side(nest: Nest, columns: Sequence[Any]) -> int:
    """Columns that a lane has: as many as 16 bytes have, where all of them move as one."""
    store = nest.store
    lanes = _BYTES * 8 // store.buffer.dtype.bits
    if not columns or lanes not in (4, 8) or not _has_last(columns[-1:], store):
        return 1
    size = constant(columns[-1].extent)
    if size is None or size % lanes:  # or a vector would reach into the next row
        return 1
    neighbours = Neighbours(FlatBuffers(), [], lanes, asks=False)
    places = _vector_places(columns, tirx.Var("column", INDEX), lanes, neighbours.lane)
    neighbours.rewrite(store.value, places)
    indices = [substitute(index, places) for index in store.indices]
    neighbours.store(store.buffer, indices, tirx.const(0, str(store.buffer.dtype)))
    return lanes if neighbours.writes else 1


def _vector(
    nest: Nest,
    flat: FlatBuffers,
    there: dict[Any, Any],
    columns: Sequence[Any],
    column: Any,
    lanes: int,
) -> list[Any]:
    """Make the stores of so many columns side by side; ``there`` places the other loops."""
    store = nest.store
    neighbours = Neighbours(flat, [], lanes, asks=False)
    mapping = {**there, **_vector_places(columns, column, lanes, neighbours.lane)}
    value = neighbours.rewrite(store.value, mapping)
    indices = [neighbours.rewrite(index, mapping) for index in store.indices]
    moved = neighbours.around([neighbours.store(store.buffer, indices, value)])
    return [only_where(_all(nest.conditions, there), moved)] if nest.conditions else moved


def _vector_places(columns: Sequence[Any], column: Any, lanes: int, lane: Any) -> dict[Any, Any]:
    """Map the variables of columns to what they are in a vector with a number."""
    extents = [*(x.extent for x in columns[:-1]), columns[-1].extent // lanes]
    *outer, last = split(column, extents)
    places = zip(columns, [*outer, last * lanes + lane], strict=True)
    return {x.loop_var: narrow(at, x.loop_var) for x, at in places}


def _has_last(loops: Sequence[Any], store: Any) -> bool:
    """Whether a loop runs along what is contiguous."""
    return any(store.indices[-1].same_as(x.loop_var) for x in loops)


def _read_scan(nest: Nest, walked: Sequence[Any]) -> tuple[Any, type, Any] | None:
    """Read ``out[k] = k > 0 ? out[k - 1] + x[k] : x[k]``: the loop, the operator and ``x[k]``."""
    store, value = nest.store, nest.store.value
    if len(walked) != 1 or nest.conditions or not is_guard(value):
        return None
    var = walked[0].loop_var
    condition, rest, first = value.args
    before = [*store.indices[:-1], tirx.max(var - 1, tirx.const(0, str(var.ty.dtype)))]
    if (
        str(store.buffer.dtype) not in _SCANNED
        or not store.indices[-1].same_as(var)
        or not isinstance(rest, (prim.Add, prim.Mul, prim.Max, prim.Min))
        or not same_expr(condition, var > 0)
        or not same_expr(rest, type(rest)(tirx.BufferLoad(store.buffer, before), first))
        or any(load.source.same_as(store.buffer) for load in loads_of(first))
    ):
        return None
    return walked[0], type(rest), first


def _scan(nest: Nest, owned: Sequence[Any], along: Any, operator: type, value: Any) -> Any:
    """Let a warp go along each row, 32 elements at a time, in logarithmically many additions."""
    store, rows, extent = nest.store, _count(owned), along.extent
    dtype, warps = str(store.buffer.dtype), _THREADS // WARP
    limits = {prim.Add: tirx.const(0, dtype), prim.Mul: tirx.const(1, dtype)}
    limits |= {prim.Max: tirx.min_value(dtype), prim.Min: tirx.max_value(dtype)}
    neutral, zero = limits[operator], index_const(0)

    def body(block: Any, thread: Any) -> list[Any]:
        row = block * warps + tirx.FloorDiv(thread, index_const(WARP))
        lane = tirx.FloorMod(thread, index_const(WARP))
        held, mapping = hold(_places(owned, row))
        own, carried = (
            tirx.decl_buffer((1,), dtype, name, scope="local") for name in ("own", "carried")
        )
        mine, before = tirx.BufferLoad(own, [zero]), tirx.BufferLoad(carried, [zero])

        def step(turn: Any) -> Any:
            at = turn * WARP + lane
            places = {**mapping, along.loop_var: narrow(at, along.loop_var)}
            there = tirx.if_then_else(at < extent, substitute(value, places), neutral)
            statements = [tirx.BufferStore(own, there, [zero])]
            for distance in (1, 2, 4, 8, 16):
                other = tirx.Var("other", dtype)
                joined = tirx.Select(lane >= distance, operator(other, mine), mine)
                statements += [
                    tirx.Bind(other, shuffle("shuffle_up", mine, distance)),
                    tirx.BufferStore(own, joined, [zero]),
                ]
            indices = [substitute(index, places) for index in store.indices]
            statements += [
                tirx.BufferStore(own, operator(before, mine), [zero]),
                only_where(at < extent, [tirx.BufferStore(store.buffer, mine, indices)]),
                tirx.BufferStore(carried, shuffle("shuffle", mine, WARP - 1), [zero]),
            ]
            return sequence(statements)

        walk = loop("turn", (extent + (WARP - 1)) // WARP, step)
        start = [tirx.AllocBuffer(own), tirx.AllocBuffer(carried)]
        start.append(tirx.BufferStore(carried, neutral, [zero]))
        return [only_where(row < rows, [*held, *start, walk])]

    return launch((rows + (warps - 1)) // warps, _THREADS, body)
