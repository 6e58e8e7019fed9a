"""Operators that write at positions held in tensors.

Writes go in the order of the positions on one thread for each line, so that there are no races, of
several writes to one element the last counts, and sums do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from relax_disc.analysis.kernels.inplace import INPLACE_ATTRIBUTE
from relax_disc.frontend.converters.indexing import broadcast_read, place_before_broadcast
from relax_disc.frontend.converters.registry import axis_of, converts
from relax_disc.frontend.emitter import Emitter

op: Any = relax.op
T: Any = builder

Body = Callable[[Sequence[Any], Any], None]


def _written(emitter: Emitter, name: str, x: Any, sources: Sequence[Any], write: Body) -> relax.Var:
    """Emit a kernel that copies ``x`` and lets ``write(inputs, output)`` change the copy.

    Of one number everywhere there is no tensor to copy.  Of another the copy may be its own memory:
    nothing else reads it.
    """
    dtype, node = emitter.dtype(x), emitter.node.args[0]
    is_filled = node.target is torch.ops.aten.full.default and isinstance(
        node.args[1], bool | int | float
    )

    def compute(x: Any, *sources: Any) -> Any:
        shape = x if is_filled else x.shape
        read = [*sources] if is_filled else [x, *sources]

        def body(inputs: Any, outputs: Any) -> Any:
            with IRBuilder() as made:
                with T.seq_scope():
                    with T.grid(*shape) as loops:
                        place = _list(loops)
                        value = (
                            tirx.const(node.args[1], dtype)
                            if is_filled
                            else inputs[0][tuple(place)]
                        )
                        T.buffer_store(outputs[0], value, place)
                    write(inputs[-len(sources) :], outputs[0])
            return made.get()

        out = tirx.decl_buffer(shape, dtype, "out")
        return te.extern([shape], read, body, dtype=dtype, out_buffers=[out], name=name)

    pairs = [] if is_filled else [[0, 1 + len(sources)]]
    start = relax.ShapeExpr(emitter.shape(x)) if is_filled else x
    return emitter.te(name, compute, start, *sources, alone=True, attrs={INPLACE_ATTRIBUTE: pairs})


def _list(loops: Any) -> list[Any]:
    return [loops] if isinstance(loops, tirx.Var) else list(loops)


@converts("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
def scatter(emitter: Emitter, x: Any, axis: int, index: Any, source: Any) -> Any:
    """Write, or add, at given positions of one axis."""
    axis = axis_of(emitter, x, axis)
    adds = "scatter_add" in str(emitter.node.target)
    name = "scatter_add" if adds else "scatter"
    if not isinstance(source, relax.Expr) or not isinstance(source.ty, relax.TensorType):
        source = emitter.tensor(source, emitter.dtype(x))
        source = emitter.emit(op.broadcast_to(source, relax.ShapeExpr(emitter.shape(index))))

    def one_of_each(source: Any, index: Any, *around: Any) -> Any:
        """Nothing is written twice: each element asks whether it is meant."""

        def element(*i: Any) -> Any:
            at = [0 if d == axis else k for d, k in enumerate(i)]
            is_meant = i[axis] == index(*at).astype("int64")
            before = around[0](*i) if is_around else tirx.const(0, source.dtype)
            value = before + source(*at) if adds and is_around else source(*at)
            return tirx.if_then_else(is_meant, value, before)

        return te.compute(around[-1].shape if is_around else around[-1], element, name=name)

    def write(inputs: Any, out: Any) -> None:
        index, source = inputs
        with T.grid(*(source if is_spread else index).shape) as loops:
            at = _list(loops)
            place = list(at)
            read = place_before_broadcast(index, at)
            place[axis] = index[tuple(read)].astype("int64")
            value = source[tuple(at)]
            T.buffer_store(out, out[tuple(place)] + value if adds else value, place)

    once = [1 if d == axis else n for d, n in enumerate(emitter.shape(x))]
    if emitter.same_shape(emitter.shape(index), once):
        is_around = not _is_zero(emitter.node.args[0])
        around = x if is_around else relax.ShapeExpr(emitter.shape(x))
        return emitter.te(name, one_of_each, source, index, around)
    is_spread = emitter.same_shape(emitter.shape(index), emitter.shape(source))
    if is_spread:  # a copy of an index in 64 bits is twice as large as the source
        index = emitter.before_broadcast(index)
    return _written(emitter, name, x, [index, source], write)


@converts("aten.index_put.default")
def index_put(emitter: Emitter, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Write, or add, where integer tensors point; a mask takes one value for all it selects."""
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(emitter.dtype(i) in ("bool", "uint8") for _, i in given):
        return _masked_put(emitter, x, [i for _, i in given], values, accumulate)
    axes = [d for d, _ in given]
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    first = axes[0] if adjacent else 0
    traced = [emitter.value(i) for i in emitter.node.args[1] if i is not None]
    new = emitter.symbols.shape(torch.broadcast_shapes(*(tuple(i.shape) for i in traced)))
    kept = [n for d, n in enumerate(emitter.shape(x)) if d not in axes]
    shape = [*kept[:first], *new, *kept[first:]]
    values = emitter.emit(op.broadcast_to(values, relax.ShapeExpr(shape)))
    rank = len(new)
    if axes == [0, 1] and rank == 1 and _is_zero(emitter.node.args[0]):
        if _counts(emitter.node.args[1][0], emitter.value(emitter.node.args[0]).shape[0]):
            shape = relax.ShapeExpr(emitter.shape(x))
            return emitter.te("index_put", _one_of_each_row, values, given[1][1], shape)

    def write(inputs: Any, out: Any) -> None:
        values, *parts = inputs
        extents = list(values.shape)
        order = [*range(first, first + rank), *range(first), *range(first + rank, len(extents))]
        with T.grid(*(extents[k] for k in order)) as loops:
            named = dict(zip(order, _list(loops), strict=True))
            at = [named[k] for k in range(len(extents))]
            rest = [*at[:first], *at[first + rank :]]
            reads = [_Reader(part) for part in parts]
            position = at[first : first + rank]
            place = []
            for d in range(len(out.shape)):
                if d in axes:
                    read = reads[axes.index(d)]
                    place.append(broadcast_read(read, position, out.shape[d]))
                else:
                    place.append(rest.pop(0))
            value = values[tuple(at)]
            T.buffer_store(out, out[tuple(place)] + value if accumulate else value, place)

    return _written(emitter, "index_put", x, [values, *(i for _, i in given)], write)


def _is_zero(node: Any) -> bool:
    return node.target is torch.ops.aten.full.default and node.args[1] == 0


def _counts(node: Any, extent: Any) -> bool:
    """Whether a node makes 0, 1, .. below an extent."""
    while node.target is torch.ops.aten._to_copy.default:
        node = node.args[0]
    if node.target is not torch.ops.aten.arange.start_step:
        return False
    first, _, *step = node.args
    return first == 0 and step in ([], [1]) and node.meta["val"].shape[0] == extent


def _one_of_each_row(values: Any, places: Any, shape: Any) -> Any:
    """One place of each row is written, once: each element asks whether it is meant."""

    def element(row: Any, place: Any, *rest: Any) -> Any:
        is_meant = place == broadcast_read(places, [row], shape[1])
        return tirx.if_then_else(is_meant, values(row, *rest), tirx.const(0, values.dtype))

    return te.compute(shape, element, name="index_put")


class _Reader:
    """Reads a buffer with call syntax."""

    def __init__(self, buffer: Any) -> None:
        self.shape = buffer.shape
        self._buffer = buffer

    def __call__(self, *place: Any) -> Any:
        return self._buffer[tuple(place)]


def _masked_put(
    emitter: Emitter, x: Any, masks: Sequence[Any], values: Any, accumulate: bool
) -> Any:
    single = all(isinstance(n, tirx.IntImm) and int(n) == 1 for n in emitter.shape(values))
    if len(masks) != 1 or not single or emitter.node.args[1][0] is None:
        raise emitter.refuse("a mask as index takes only a single value")
    shape = emitter.shape(x)
    mask_shape = emitter.shape(masks[0])
    mask_shape = [*mask_shape, *([tirx.IntImm("int64", 1)] * (len(shape) - len(mask_shape)))]
    mask = emitter.emit(op.reshape(emitter.tensor(masks[0], "bool"), relax.ShapeExpr(mask_shape)))
    value = emitter.emit(op.reshape(values, relax.ShapeExpr([])))
    if accumulate:
        value = emitter.emit(op.add(x, value))
    return emitter.emit(op.where(mask, value, x))
