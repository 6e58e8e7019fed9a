"""Tensors that are computed whole from rows of which some are missing: islands in a packed step.

Attention that is written out, with a cap on the scores or with positions in them, has scores of
pairs of rows.  They are computed for the padded batch, from rows that are laid out in it with zeros
where they are not needed; what comes of it is packed again.  So everything around is packed.

Of each element it is known whether it is that of the padded batch.  A *pair* has two axes of
positions, and an axis is

- *partial* where elements at its rows that are not needed may be others;
- *hollow* where elements at its rows that are not needed are zero, in the padded batch as well,
  wherever the rows of all other axes are needed: weights of keys that a mask hides;
- *empty* where they are zero whatever the rows of other axes: the gradient of what nobody needs.

What is zero on both sides is no other, so such axes are not partial.  A sum over a partial axis is
that of the padded batch if each term has a factor that is zero there.  All others are finite:
operators that make no infinities of zeros are the only ones here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.stages import (
    constant,
    is_buffer,
    loads_of,
    loops_of,
    read_stages,
    same_expr,
)
from relax_disc.analysis.padding.grid import Grid, Rows
from relax_disc.analysis.padding.operators import Operand
from relax_disc.analysis.symbolic.expr import content
from relax_disc.analysis.symbolic.from_tirx import elements, from_tirx
from relax_disc.errors import GraphError

_FINITE = frozenset(
    f"relax.{name}"
    for name in "add subtract multiply maximum minimum where negative astype abs tanh sigmoid erf "
    "sin cos square nn.relu nn.gelu nn.gelu_tanh nn.silu".split()
)
_COMPARED = frozenset(
    f"relax.{name}" for name in "equal not_equal less less_equal greater greater_equal".split()
)
_NOT_ZERO = _COMPARED | {"relax.sigmoid", "relax.cos"}
"""Operators that make of zeros something else."""
_MOVES = ("relax.reshape", "relax.expand_dims", "relax.squeeze")


@dataclass(frozen=True, slots=True)
class Partial:
    """Which elements of a tensor are those of the padded batch; axes as in the module.

    ``batch``: the axis of the sequences, and how many parts of it each has; (-1, 1): none.
    """

    batch: tuple[int, int] = (-1, 1)
    partial: frozenset[int] = frozenset()
    hollow: frozenset[int] = frozenset()
    empty: frozenset[int] = frozenset()

    @property
    def is_exact(self) -> bool:
        """Whether all elements are those of the padded batch."""
        return not self.partial

    @property
    def tracked(self) -> frozenset[int]:
        """Axes of positions of which something is known."""
        return self.partial | self.hollow | self.empty

    def settled(self) -> Partial:
        """Take axes for exact at which elements that may be others are zero."""
        if len(self.tracked) == 1:
            self = replace(self, hollow=frozenset(), empty=self.empty | self.hollow)
        partial = self.partial - self.empty
        for axis in sorted(self.hollow & partial):
            if self.tracked - {axis} <= (partial - {axis}) | self.empty:
                partial -= {axis}
        return replace(self, partial=partial, hollow=self.hollow - self.empty)

    def moved(self, axes: Mapping[int, int], batch: tuple[int, int] | None = None) -> Partial:
        """Number axes anew; raises `KeyError` for one that is tracked and gone."""
        if batch is None:
            outer, parts = self.batch
            batch = (axes[outer], parts) if outer != -1 else (-1, 1)
        found = [frozenset(axes[k] for k in e) for e in (self.partial, self.hollow, self.empty)]
        return Partial(batch, *found)

    def fits_rows(self, rows: Rows) -> bool:
        """Whether the rows of the tensor that are needed are those of the padded batch."""
        if self.is_exact and not self.tracked:
            return True
        is_both = rows.layout == "both" and self.batch == (rows.batch, 1)
        return is_both and self.tracked <= {rows.length}

    def is_zero_at(self, rows: Rows) -> bool:
        """Whether the rows of the tensor that are not needed are zero."""
        return self.fits_rows(rows) and rows.length in self.empty


EXACT = Partial()


def laid_out(rows: Rows, is_zero: bool) -> Partial | None:
    """Describe rows that are laid out in the padded batch; None: it is not known how.

    ``is_zero``: whether those that are not needed are zero in the padded batch, too.
    """
    if rows.layout != "both":
        return None
    axis = frozenset({rows.length})
    return Partial((rows.batch, 1), axis, frozenset(), axis if is_zero else frozenset()).settled()


def describe_island(
    call: relax.Call,
    operands: Sequence[tuple[Operand, Partial]],
    grid: Grid,
    kernel: tirx.PrimFunc | None = None,
) -> Partial | None:
    """Say which elements of a call's result are those of the padded batch; None: it is not known.

    ``operands``: each with what is known of it; `EXACT` for all that is computed whole. ``kernel``:
    what a ``call_tir`` calls.
    """
    name, kind = call.op.name, call.ty
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        return None
    try:
        if name in _FINITE | _COMPARED or name == "relax.broadcast_to":
            return _elementwise(name, kind, operands)
        if name == "relax.divide" and _is_number(*operands[1]):
            return _elementwise(name, kind, operands)
        if kernel is not None:
            return _by_kernel(kernel, [known for _, known in operands])
        (first, known), rest = (operands[0][0].kind, operands[0][1]), operands[1:]
        if name in _MOVES:
            return _reshaped(first, kind, known, grid)
        if name == "relax.permute_dims":
            rank = len(kind.shape.values)
            axes = call.attrs.axes
            axes = reversed(range(rank)) if axes is None else axes
            return known.moved({int(axis) % rank: k for k, axis in enumerate(axes)})
        if name == "relax.sum":
            return _summed(call, first, known)
        if name == "relax.matmul" and len(rest) == 1:
            return _product((first, known), (rest[0][0].kind, rest[0][1]))
    except (KeyError, GraphError):
        return None
    return None


def _is_number(divisor: Operand, known: Partial) -> bool:
    """Whether one number divides all: where it is zero what is needed is no number either."""
    is_one = all(constant(n) == 1 for n in divisor.kind.shape.values)
    return known == EXACT and is_one and divisor.constant != 0.0


def _by_kernel(kernel: tirx.PrimFunc, operands: Sequence[Partial]) -> Partial | None:
    """Describe what a kernel takes, or adds up, where tensors that are whole say.

    Elements at one row of an axis are to be made of those at the same row, or of all its rows.
    """
    buffers = [param for param in kernel.params if is_buffer(param)]
    tracked = [k for k, known in enumerate(operands) if known.tracked]
    if len(buffers) != len(operands) + 1 or len(tracked) != 1:
        return None
    source, known = buffers[tracked[0]], operands[tracked[0]]
    staged = read_stages(kernel)
    stages = loops_of(kernel) if staged is None else list(staged.stages)
    if stages is None or any(stage.lets or stage.combiner is not None for stage in stages):
        return None
    *before, last = stages
    value = last.value
    if before:
        is_zero = len(before) == 1 and isinstance(before[0].value, prim.FloatImm)
        if not is_zero or float(before[0].value.value) != 0.0 or not isinstance(value, prim.Add):
            return None
        if not before[0].buffer.same_as(last.buffer) or not _reads_itself(value.a, last):
            return None
        value = value.b
    if not isinstance(value, tvm.ir.TensorLoad) or not value.source.same_as(source):
        return None
    read, written = list(value.indices), list(last.indices)
    if any(load.source in (source, last.buffer) for load in loads_of([*read, *written])):
        return None
    extents = {axis.var: axis.extent for axis in last.axes}
    axes = {}
    for axis in {*known.tracked, known.batch[0]}:
        var = read[axis]
        is_whole = isinstance(var, tvm.ir.Var) and same_expr(extents.get(var), source.shape[axis])
        if not is_whole or sum(index.same_as(var) for index in read) != 1:
            return None
        found = [k for k, index in enumerate(written) if index.same_as(var)]
        if found and not same_expr(last.buffer.shape[found[0]], source.shape[axis]):
            return None
        if len(found) == 1:
            axes[axis] = found[0]
        elif found or not before or axis == known.batch[0]:
            return None
    for axis in sorted(known.tracked - axes.keys()):
        summed = _without(known, axis)
        if summed is None:
            return None
        known = summed
    return known.moved(
        {axis: k for axis, k in axes.items() if axis in {*known.tracked, known.batch[0]}}
    )


def _reads_itself(value: Any, stage: Any) -> bool:
    is_load = isinstance(value, tvm.ir.TensorLoad) and value.source.same_as(stage.buffer)
    return is_load and same_expr(list(value.indices), list(stage.indices))


def weights_of(scores: Partial, query: int, key: int) -> Partial:
    """Describe the softmax of scores over keys that are needed, or hidden, for needed queries."""
    return Partial(scores.batch, scores.tracked - {key} | {query}, frozenset({key}))


def _one_batch(parts: Iterable[Partial]) -> tuple[int, int]:
    """Return where sequences are; raises `KeyError` where they are in different axes."""
    found = {part.batch for part in parts if part.tracked}
    if len(found) > 1:
        raise KeyError
    return next(iter(found), (-1, 1))


def _elementwise(
    name: str, kind: relax.TensorType, operands: Sequence[tuple[Operand, Partial]]
) -> Partial | None:
    rank, parts, present = len(kind.shape.values), [], []
    for each, known in operands:
        extents = each.kind.shape.values
        shift = rank - len(extents)
        parts.append(known.moved({axis: axis + shift for axis in range(len(extents))}))
        spread = {k + shift for k, n in enumerate(extents) if constant(n) == 1}
        present.append(frozenset(range(shift, rank)) - spread)
    for part, axes in zip(parts, present, strict=True):
        if not part.tracked <= axes or (part.tracked and part.batch[0] not in axes):
            return None
    partial = frozenset[int]().union(*(part.partial for part in parts))
    hollow = [part.hollow | part.empty for part in parts]
    empty = [part.empty for part in parts]
    batch = _one_batch(parts)
    if name in ("relax.multiply", "relax.divide"):
        zero = [frozenset[int]().union(*sets) for sets in (hollow, empty)]
        return Partial(batch, partial, *zero).settled()
    if name in _NOT_ZERO:
        return Partial(batch, partial)
    added = range(1 if name == "relax.where" else 0, len(parts))  # or chosen
    added = [k for k in added if operands[k][0].constant != 0.0]
    common = [[sets[k] for k in added] or [frozenset[int]()] for sets in (hollow, empty)]
    found = Partial(batch, partial, *(frozenset.intersection(*sets) for sets in common))
    if not frozenset[int]().union(*(part.partial | part.hollow for part in parts)) <= found.tracked:
        found = replace(found, hollow=frozenset())  # it asks for rows of an axis that is gone
    return found.settled()


def _reshaped(
    source: relax.TensorType, target: relax.TensorType, known: Partial, grid: Grid
) -> Partial | None:
    """Follow axes that keep their extent and their stride; sequences may be joined with heads."""
    places = [_strides(kind.shape.values) for kind in (source, target)]
    axes = {}
    for axis in known.tracked:
        extent = from_tirx(source.shape.values[axis])
        found = [
            k
            for k, n in enumerate(target.shape.values)
            if from_tirx(n) == extent and places[1][k] == places[0][axis]
        ]
        if len(found) != 1:
            return None
        axes[axis] = found[0]
    outer, parts = known.batch
    if outer == -1:
        return known.moved(axes)
    # Elements of one sequence follow each other: how many they are does not change.
    per_sequence = places[0][outer] * parts
    for k, n in enumerate(target.shape.values):
        size = from_tirx(n)
        count = content(size) // grid.times
        if size == from_tirx(grid.batch) * count and per_sequence == places[1][k] * count:
            return known.moved(axes, (k, count))
    return None


def _strides(shape: Sequence[Any]) -> list[Any]:
    return [elements(shape[axis + 1 :]) for axis in range(len(shape))]


def _summed(call: relax.Call, kind: relax.TensorType, known: Partial) -> Partial | None:
    rank, named = len(kind.shape.values), call.attrs.axis
    over = set(range(rank)) if named is None else {int(axis) % rank for axis in named}
    keeps = bool(call.attrs.keepdims)
    for axis in sorted(over & known.tracked):
        result = _without(known, axis)
        if result is None:
            return None
        known = result
    if known.batch[0] in over:
        if not known.is_exact:
            return None
        known = EXACT
    left = [axis for axis in range(rank) if keeps or axis not in over]
    axes = {axis: k for k, axis in enumerate(left)}
    return known.moved({k: v for k, v in axes.items() if k not in over})


def _without(known: Partial, axis: int) -> Partial | None:
    """Describe sums over an axis."""
    is_empty = axis in known.empty
    partial = known.partial - {axis}
    if axis in known.partial and not is_empty:
        if axis not in known.hollow:
            return None
        partial |= known.tracked - {axis} - known.empty
    empty = known.empty - {axis} | (_zero_with(known, axis) if is_empty else frozenset())
    return Partial(known.batch, partial, frozenset(), empty).settled()


def _zero_with(known: Partial, axis: int) -> frozenset[int]:
    """Axes at which elements are zero where the rows of another are needed, if nothing else is."""
    found = known.hollow - {axis}
    return found if known.tracked <= found | {axis} and len(found) == 1 else frozenset()


def _product(one: tuple[Any, Partial], other: tuple[Any, Partial]) -> Partial | None:
    """Describe a product: its terms are zero where a factor is."""
    (left, x), (right, y) = one, other
    ranks = len(left.shape.values), len(right.shape.values)
    if min(ranks) < 2:
        return None
    rank = max(ranks)
    # Both over the axes of the result, then the inner one, which has the number `rank`.
    places = [
        {k: k + rank - ranks[0] for k in range(ranks[0])} | {ranks[0] - 1: rank},
        {k: k + rank - ranks[1] for k in range(ranks[1])} | {ranks[1] - 2: rank},
    ]
    x, y = (part.moved(axes) for part, axes in zip((x, y), places, strict=True))
    batch = _one_batch([x, y])
    if batch[0] >= rank - 2 or x.tracked & y.tracked - {rank}:
        return None
    for (kind, part), own in zip(((left, x), (right, y)), ranks, strict=True):
        outer = batch[0] - rank + own  # where this one has the sequences
        if part.tracked and (outer < 0 or constant(kind.shape.values[outer]) == 1):
            return None
    inner = rank
    for part, factor in ((x, y), (y, x)):
        if inner not in part.partial or inner in part.empty | factor.empty:
            continue
        if inner not in part.hollow | factor.hollow:
            return None
    is_empty = inner in x.empty | y.empty
    partial = (x.partial | y.partial) - {inner}
    if inner in x.partial | y.partial and not is_empty:
        for part in (x, y):
            if inner in part.hollow:
                partial |= part.tracked - {inner} - part.empty
                break
    hollow, empty = frozenset[int](), frozenset[int]()
    for part in (x, y):
        empty |= part.empty - {inner}
        if is_empty:
            empty |= _zero_with(part, inner)
        elif inner not in x.tracked | y.tracked:
            hollow |= part.hollow
        elif inner not in part.tracked:
            hollow |= part.hollow
    return Partial(batch, partial, hollow, empty).settled()
