"""CPU rule: kernels written as raw loops (scatters, `index_put`) over threads and in vectors.

Owned loops (`relax_disc.tir_kernels.nests`) are spread over the threads, in strips of what is
contiguous, so that the strip of a table that a thread writes stays in its cache.  Walked loops run
in their order inside: results are those of the loops to the last bit, whatever the number of
threads.  Of kernels in another form loops lose the parallelism that races.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import collapse
from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.analysis.kernels.stages import Axis, constant, nodes_of
from relax_disc.tir_kernels.cpu.elementwise import SERIAL_ELEMENTS
from relax_disc.tir_kernels.flat import FlatBuffers, index_const, product
from relax_disc.tir_kernels.loops import (
    LANES,
    Scheduled,
    decode,
    group_extent,
    group_mapping,
    loop,
    narrow,
    sequence,
    vector_loop,
    with_body,
)
from relax_disc.tir_kernels.nests import Nest, read_nests
from relax_disc.tir_kernels.vectorizable import uses_any, vectorizable

_STRIP = 4 * LANES  # elements of a row: 256 bytes of float32, what one prefetch stream likes
_STRIPS = 4  # of a row, if it is long enough


class RawLoops:
    """Schedule rule for kernels outside of block form."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when no loop can be spread and none races."""
        loops = nodes_of(tirx.For, func.body)
        if any(each.kind == tirx.ForKind.PARALLEL for each in loops):
            return _without_races(func)
        nests = read_nests(func)
        if nests is None or not any(nest.owned for nest in nests):
            return None
        flat = FlatBuffers(bits=True)
        statements = [_emit(nest, flat) for nest in nests]
        return with_body(func, [*flat.declarations(), *statements])


def _emit(nest: Nest, flat: FlatBuffers) -> Any:
    """Make the loops of a nest: units of owned iterations in parallel, the walked ones inside."""
    store, walked = nest.store, nest.walked
    value, keys = store.value, [*nest.conditions, *_looked_up(nest)]
    axes = [Axis(x.loop_var, x.extent, False) for x in _in_memory_order(nest)]
    unit = {x.var: narrow(index_const(0), x.var) for x in axes if constant(x.extent) == 1}
    axes = [x for x in axes if x.var not in unit]
    groups = collapse(axes, [value, *keys], [[store.buffer, *store.indices]])
    has_rows = bool(groups) and store.indices[-1].same_as(groups[-1][-1].var)
    inner = groups.pop() if has_rows else []
    in_vectors = has_rows and _moves_in_vectors(nest, inner, keys)
    variables = {axis.var for axis in inner}  # conditions along a row, and those of all of it
    along = [condition for condition in nest.conditions if uses_any(condition, variables)]
    across = [condition for condition in nest.conditions if not uses_any(condition, variables)]
    extent = group_extent(inner) if inner else index_const(1)
    size = constant(extent)
    strip = _strip(size)
    strips = (extent + (strip - 1)) // strip
    extents = [*map(group_extent, groups), strips]

    def part(index: Any) -> Any:
        statements, (*outer, number) = decode(index, extents, "unit")
        mapping = dict(unit)
        for group, place in zip(groups, outer, strict=True):
            mapping.update(group_mapping(group, place))
        first = number * strip
        whole = size is not None and size % strip == 0
        width = index_const(strip) if whole else tirx.min(index_const(strip), extent - first)
        if size is not None and size < strip:
            first, width = index_const(0), index_const(size)

        def only_where(conditions: Sequence[Any], made: Any, mapping: dict[Any, Any]) -> Any:
            for condition in reversed(conditions):
                made = tirx.IfThenElse(flat.rewrite(condition, mapping), made, None)
            return made

        def write(mapping: dict[Any, Any]) -> Any:
            indices = [flat.rewrite(place, mapping) for place in store.indices]
            made = flat.store(store.buffer, indices, flat.rewrite(value, mapping))
            return only_where(along, made, mapping)

        def walk(rest: Sequence[Any], mapping: dict[Any, Any]) -> Any:
            if rest:
                var = rest[0].loop_var
                return loop(
                    str(var.name),
                    rest[0].extent,
                    lambda at: walk(rest[1:], {**mapping, var: narrow(at, var)}),
                )
            if not inner:
                columns = [write(mapping)]
            else:

                def column(at: Any) -> Any:
                    return write({**mapping, **group_mapping(inner, first + at)})

                columns = (
                    vector_loop("column", width, column)
                    if in_vectors
                    else [loop("column", width, column)]
                )
            return only_where(across, sequence(columns), mapping)

        return sequence([*statements, walk(walked, mapping)])

    units, steps = product(extents), constant(product([x.extent for x in nest.loops]))
    is_small = constant(units) == 1 or (steps is not None and steps <= SERIAL_ELEMENTS)
    kind = tirx.ForKind.SERIAL if is_small else tirx.ForKind.PARALLEL
    return loop("unit", units, part, kind)


def _in_memory_order(nest: Nest) -> list[Any]:
    """List the owned loops in the order of the axes that they are indices of."""
    order = {x.loop_var: x for x in nest.owned}
    found = [order.pop(index) for index in nest.store.indices if index in order]
    return [*found, *order.values()]


def _looked_up(nest: Nest) -> list[Any]:
    owned = {x.loop_var for x in nest.owned}
    return [index for index in nest.store.indices if index not in owned]


def _moves_in_vectors(nest: Nest, inner: Sequence[Axis], keys: Sequence[Any]) -> bool:
    """Whether elements side by side are written by the same walked iterations, in vectors."""
    variables = {axis.var for axis in inner}
    return (
        not uses_any(keys, variables)
        and str(nest.store.buffer.dtype) != "bfloat16"
        and vectorizable([nest.store.value], inner[-1].var)
    )


def _strip(size: int | None) -> int:
    """Return how many elements of a row are a unit: fewer of rows that would be few of them."""
    strip = _STRIP
    while size is not None and strip > LANES and size < _STRIPS * strip:
        strip //= 2
    return strip


def _without_races(func: tirx.PrimFunc) -> Scheduled:
    """Make loops serial that race, or that start anew inside another; None when there are none.

    TVM spreads such loops without asking whether two iterations write the same element: a write's
    address may depend on the loop only through values that are read (``out[index[i]] += x[i]``).
    Inside another loop starting the threads costs more than it brings.
    """
    changed = False
    depth = 0

    def on_loop(nest: Any, mutator: Any) -> Any:
        nonlocal changed, depth
        depth += 1
        try:
            inside = mutator.default_mutate(nest)
        finally:
            depth -= 1
        if nest.kind != tirx.ForKind.PARALLEL or (depth == 0 and not _races(nest)):
            return inside
        changed = True
        return tirx.For(
            inside.loop_var, inside.min, inside.extent, tirx.ForKind.SERIAL, inside.body
        )

    body = mutate(func.body, (tirx.For, on_loop))
    return s_tir.Schedule(func.with_body(body)) if changed else None


def _races(nest: Any) -> bool:
    """Whether two iterations of a loop may write the same element."""
    stores = nodes_of(tirx.BufferStore, nest.body)
    return any(not _uses_directly(store.indices, nest.loop_var) for store in stores)


def _uses_directly(indices: Sequence[Any], var: Any) -> bool:
    """Whether a variable occurs in indices other than to look up further indices."""

    def without_reads(load: Any, mutator: Any) -> Any:
        return tirx.const(0, str(load.ty.dtype))

    return any(
        uses_any(mutate(index, (tvm.ir.TensorLoad, without_reads)), {var}) for index in indices
    )
