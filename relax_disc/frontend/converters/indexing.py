"""Operators that read at positions held in tensors."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from relax_disc import ops
from relax_disc.analysis.kernels.stages import constant
from relax_disc.frontend.converters.registry import axis_of, converts
from relax_disc.frontend.emitter import Emitter

op: Any = relax.op


def wrapped(index: Any, extent: Any) -> Any:
    """Count a negative position from the end."""
    index = index.astype("int64")
    return tirx.Select(index < 0, index + extent, index)


@converts("aten.embedding.default")
def embedding(
    emitter: Emitter,
    weight: Any,
    ids: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of a table."""

    def compute(table: Any, ids: Any) -> Any:
        shape = [*ids.shape, table.shape[1]]
        return te.compute(
            shape, lambda *i: table(ids(*i[:-1]).astype("int64"), i[-1]), name="embedding"
        )

    return emitter.te("embedding", compute, weight, ids)


@converts("aten.embedding_dense_backward.default")
def embedding_backward(
    emitter: Emitter, grad: Any, ids: Any, count: Any, padding_idx: int, by_frequency: bool
) -> Any:
    """Gradient of a table, whole."""
    if by_frequency:
        raise emitter.refuse("scale_grad_by_freq is not supported")
    if not isinstance(count, int | tirx.IntImm):
        raise emitter.refuse("the table has as many rows as a dim says")
    call = ops.embedding_backward(
        grad, ids, num_embeddings=int(count), padding_idx=int(padding_idx)
    )
    return emitter.emit(call)


@converts("aten.gather.default")
def gather(emitter: Emitter, x: Any, axis: int, index: Any, sparse_grad: bool = False) -> Any:
    """Elements at given positions of one axis."""
    if not emitter.shape(index):
        return emitter.emit(op.reshape(x, relax.ShapeExpr([])))
    axis = axis_of(emitter, x, axis)

    # A copy of an index of rows for each of their columns is twice as large as what is gathered.
    narrow, wanted, extents = (
        emitter.before_broadcast(index),
        emitter.shape(index),
        emitter.shape(x),
    )
    if len(emitter.shape(narrow)) != len(wanted):  # one number everywhere, say
        narrow = index
    pairs = zip(emitter.shape(narrow), wanted, strict=True)
    spread = [constant(own) == 1 and constant(n) != 1 for own, n in pairs]
    of_x = zip(spread, wanted, extents, strict=False)
    if not all(emitter.same_shape([n], [m]) for is_spread, n, m in of_x if is_spread):
        narrow, spread = index, [False] * len(wanted)

    def compute(a: Any, index: Any) -> Any:
        def element(*i: Any) -> Any:
            at = [0 if is_spread else j for is_spread, j in zip(spread, i, strict=True)]
            place = index(*at).astype("int64")
            return a(*(place if d == axis else j for d, j in enumerate(i)))

        both = zip(spread, index.shape, a.shape, strict=True)
        shape = [m if is_spread else n for is_spread, n, m in both]
        return te.compute(shape, element, name="gather")

    return emitter.te("gather", compute, x, narrow)


@converts("aten.index.Tensor")
def index(emitter: Emitter, x: Any, indices: Any) -> Any:
    """Advanced indexing with integer tensors, PyTorch's rules for where the new axes go."""
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(emitter.dtype(i) in ("bool", "uint8") for _, i in given):
        raise emitter.refuse("a mask as index makes a shape that depends on data")
    axes = [d for d, _ in given]
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    rank = max(len(emitter.shape(i)) for _, i in given)
    first = axes[0] if adjacent else 0

    def compute(a: Any, *rest: Any) -> Any:
        *parts, shape = rest

        def element(*i: Any) -> Any:
            new, kept = i[first : first + rank], [*i[:first], *i[first + rank :]]
            place = []
            for d in range(len(a.shape)):
                if d in axes:
                    place.append(broadcast_read(parts[axes.index(d)], new, a.shape[d]))
                else:
                    place.append(kept.pop(0))
            return a(*place)

        return te.compute(shape, element, name="index")

    shape = relax.ShapeExpr(emitter.wanted_shape)
    return emitter.te("index", compute, x, *(i for _, i in given), shape)


def broadcast_read(index: Any, position: Any, extent: Any) -> Any:
    """Read an index tensor that broadcasts to the rank of ``position``."""
    tail = position[len(position) - len(index.shape) :]
    return wrapped(index(*place_before_broadcast(index, tail)), extent)


def place_before_broadcast(index: Any, position: Any) -> list[Any]:
    """Where an index tensor of the same rank is read that broadcasts to that of ``position``."""
    return [0 if constant(n) == 1 else j for n, j in zip(index.shape, position, strict=True)]


@converts("aten.index_select.default")
def index_select(emitter: Emitter, x: Any, axis: int, index: Any) -> Any:
    """Positions of one axis."""
    axis = axis_of(emitter, x, axis)

    def compute(a: Any, index: Any, shape: Any) -> Any:
        def element(*i: Any) -> Any:
            return a(*(wrapped(index(j), a.shape[d]) if d == axis else j for d, j in enumerate(i)))

        return te.compute(shape, element, name="index_select")

    return emitter.te("index_select", compute, x, index, relax.ShapeExpr(emitter.wanted_shape))
