"""Operators that move elements or read them at other places: views, slices, concatenation.

Target shapes are taken from what PyTorch traced, so that equal sizes are equal expressions.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from relax_disc.frontend.converters.registry import axes_of, axis_of, converts
from relax_disc.frontend.emitter import Emitter

op: Any = relax.op

_FAR = 2**62
"""PyTorch writes "to the end" as an end of 2**63 - 1."""


@converts("aten.view.default", "aten.unsqueeze.default", "aten.squeeze.dims")
def reshape(emitter: Emitter, x: Any, *_: Any) -> Any:
    """All that keeps the elements in their order."""
    if emitter.same_shape(emitter.shape(x), emitter.wanted_shape):
        return x
    return emitter.emit(op.reshape(x, relax.ShapeExpr(emitter.wanted_shape)))


@converts("aten.as_strided.default")
def as_strided(emitter: Emitter, x: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    """A view by strides, where the strides are those of a contiguous tensor."""
    expected: Any = tirx.IntImm("int64", 1)
    whole = offset in (None, 0) and emitter.value(emitter.node.args[0]).is_contiguous()
    for n, given in reversed(list(zip(emitter.wanted_shape, stride, strict=True))):
        given = tirx.IntImm("int64", given) if isinstance(given, int) else given
        whole = whole and emitter.symbols.equal(given, expected)
        expected = expected * n
    count: Any = tirx.IntImm("int64", 1)
    for n in emitter.shape(x):
        count = count * n
    if not whole or not emitter.symbols.equal(count, expected):
        raise emitter.refuse("only strides of a contiguous tensor are supported")
    return reshape(emitter, x)


@converts("aten.expand.default")
def expand(emitter: Emitter, x: Any, *_: Any, implicit: bool = False) -> Any:
    """Broadcast."""
    if emitter.same_shape(emitter.shape(x), emitter.wanted_shape):
        return x
    return emitter.emit(op.broadcast_to(x, relax.ShapeExpr(emitter.wanted_shape)))


@converts("aten.copy.default")
def copy(emitter: Emitter, x: Any, source: Any, non_blocking: bool = False) -> Any:
    """The values of ``source`` in shape and type of ``x``."""
    return expand(emitter, emitter.cast(source, emitter.wanted_dtype))


@converts("aten.permute.default")
def permute(emitter: Emitter, x: Any, axes: Any) -> Any:
    """Permutation of the axes."""
    axes = [axis_of(emitter, x, a) for a in axes]
    return x if axes == sorted(axes) else emitter.emit(op.permute_dims(x, axes))


@converts("aten.cat.default")
def cat(emitter: Emitter, tensors: Any, axis: int = 0) -> Any:
    """Concatenation; PyTorch skips empty tensors of rank 1."""
    rank = len(emitter.wanted.shape)
    kept = [
        emitter.tensor(t, emitter.wanted_dtype) for t in tensors if len(t.ty.shape.values) == rank
    ]
    if len(kept) == 1:
        return kept[0]
    axis = axis if axis >= 0 else axis + rank
    first, *others = (emitter.shape(t) for t in kept)
    for other in others:
        if not emitter.same_shape(
            [*first[:axis], *first[axis + 1 :]], [*other[:axis], *other[axis + 1 :]]
        ):
            raise emitter.refuse("TVM cannot show that the other axes are of one size")
    result = emitter.emit(op.concat(kept, axis))
    if _terms(emitter.shape(result)[axis]) > _terms(emitter.wanted_shape[axis]):
        raise emitter.refuse("FuseTIR takes the extents n + 1 + 1 and n + 2 for different ones")
    return result


def _terms(extent: Any) -> int:
    if not isinstance(extent, tirx.Add | tirx.Sub):
        return 1
    return _terms(extent.a) + _terms(extent.b)


def _clamped(emitter: Emitter, position: Any, extent: Any, otherwise: Any) -> Any:
    """Write a slice's start or end as a non-negative position, without bounds that always hold."""
    analyzer = emitter.symbols.analyzer
    if position is None:
        return otherwise
    if isinstance(position, int):
        if position >= _FAR:
            return extent
        position = tirx.IntImm("int64", position)
    if analyzer.can_prove(position < 0):
        position = extent + position
    elif not analyzer.can_prove(position >= 0):
        position = tirx.Select(position < 0, extent + position, position)
    if not analyzer.can_prove(position <= extent):
        position = tirx.min(position, extent)
    if not analyzer.can_prove(position >= 0):
        position = tirx.max(position, tirx.IntImm("int64", 0))
    return analyzer.simplify(position)


@converts("aten.slice.Tensor")
def slice_(
    emitter: Emitter, x: Any, axis: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    """Slice along one axis."""
    shape, wanted = emitter.shape(x), emitter.wanted_shape
    if emitter.same_shape(shape, wanted) and _is_one(step):
        return x
    axis = axis_of(emitter, x, axis)
    first = _clamped(emitter, start, shape[axis], tirx.IntImm("int64", 0))
    # With symbolic bounds TVM infers min(length, 128), without seeing that length is at most that,
    # and the shape would match nothing later on: then the kernel is written with the traced shape.
    last = _clamped(emitter, end, shape[axis], shape[axis])
    bounds = first, last, shape[axis], step
    if all(isinstance(bound, int | tirx.IntImm) for bound in bounds):
        return emitter.emit(op.strided_slice(x, [axis], [first], [last], [step]))

    def compute(a: Any, first: Any, shape: Any, step: Any = step) -> Any:
        def element(*index: Any) -> Any:
            return a(*(i * step + first if d == axis else i for d, i in enumerate(index)))

        return te.compute(shape, element, name="slice")

    return emitter.te("slice", compute, x, first, relax.ShapeExpr(wanted), *_if_size(step))


def _is_one(step: Any) -> bool:
    return isinstance(step, int) and step == 1


def _if_size(step: Any) -> tuple[Any, ...]:
    """Return what a kernel must be given besides: a step that is a size."""
    return () if isinstance(step, int) else (step,)


@converts("aten.slice_backward.default")
def slice_backward(
    emitter: Emitter, grad: Any, sizes: Any, axis: int, start: Any, end: Any, step: Any
) -> Any:
    """Gradient of a slice: zeros around the slice."""
    axis = axis + len(emitter.wanted.shape) if axis < 0 else axis
    zero = tirx.const(0, emitter.dtype(grad))
    first = _clamped(emitter, start, emitter.wanted_shape[axis], tirx.IntImm("int64", 0))
    return _placed(emitter, "slice_backward", grad, lambda *_: zero, axis, first, step)


@converts("aten.slice_scatter.default")
def slice_scatter(
    emitter: Emitter,
    x: Any,
    source: Any,
    axis: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Any:
    """A tensor with one slice replaced."""
    axis = axis_of(emitter, x, axis)
    first = _clamped(emitter, start, emitter.shape(x)[axis], tirx.IntImm("int64", 0))
    return _placed(emitter, "slice_scatter", source, x, axis, first, step)


def _placed(
    emitter: Emitter, name: str, part: Any, around: Any, axis: int, first: Any, step: Any
) -> Any:
    """Place ``part`` at ``first``, ``first + step``, ... of an axis, ``around`` elsewhere."""

    def kernel(part: Any, around: Any, first: Any, shape: Any, step: Any = step) -> Any:
        count = part.shape[axis]

        def element(*index: Any) -> Any:
            offset = index[axis] - first
            place = offset if _is_one(step) else tirx.floordiv(offset, step)
            inside = tirx.all(offset >= 0, place < count)
            if not _is_one(step):
                inside = tirx.all(inside, tirx.floormod(offset, step) == 0)
            moved = part(*(place if d == axis else i for d, i in enumerate(index)))
            return tirx.if_then_else(inside, moved, around(*index))

        return te.compute(shape, element, name=name)

    shape = relax.ShapeExpr(emitter.wanted_shape)
    if isinstance(around, relax.Expr):
        return emitter.te(name, kernel, part, around, first, shape, *_if_size(step))
    of_part = lambda p, f, s, *step: kernel(p, around, f, s, *step)  # noqa: E731
    return emitter.te(name, of_part, part, first, shape, *_if_size(step))


@converts("aten.select.int")
def select(emitter: Emitter, x: Any, axis: int, index: Any) -> Any:
    """One position of an axis."""
    axis = axis_of(emitter, x, axis)
    position = _clamped(emitter, index, emitter.shape(x)[axis], None)

    def compute(a: Any, position: Any, shape: Any) -> Any:
        return te.compute(shape, lambda *i: a(*i[:axis], position, *i[axis:]), name="select")

    return emitter.te("select", compute, x, position, relax.ShapeExpr(emitter.wanted_shape))


@converts("aten.select_backward.default")
def select_backward(emitter: Emitter, grad: Any, sizes: Any, axis: int, index: Any) -> Any:
    """Gradient of a selection: zeros at the other positions."""
    axis = axis + len(emitter.wanted.shape) if axis < 0 else axis
    position = _clamped(emitter, index, emitter.wanted_shape[axis], None)
    zero = tirx.const(0, emitter.dtype(grad))

    def compute(g: Any, position: Any, shape: Any) -> Any:
        def element(*i: Any) -> Any:
            return tirx.if_then_else(i[axis] == position, g(*i[:axis], *i[axis + 1 :]), zero)

        return te.compute(shape, element, name="select_backward")

    shape = relax.ShapeExpr(emitter.wanted_shape)
    return emitter.te("select_backward", compute, grad, position, shape)


@converts("aten.split_with_sizes.default")
def split(emitter: Emitter, x: Any, sizes: Any, axis: int = 0) -> Any:
    """Pieces of an axis, each an own tensor."""
    axis = axis_of(emitter, x, axis)
    first: Any = tirx.IntImm("int64", 0)
    pieces = []

    def compute(a: Any, first: Any, shape: Any) -> Any:
        return te.compute(
            shape, lambda *i: a(*i[:axis], i[axis] + first, *i[axis + 1 :]), name="split"
        )

    for value in emitter.wanted:
        shape = emitter.symbols.shape(value.shape)
        pieces.append(emitter.te("split", compute, x, first, relax.ShapeExpr(shape)))
        first = emitter.symbols.analyzer.simplify(first + shape[axis])
    return tuple(pieces)


@converts("aten.flip.default")
def flip(emitter: Emitter, x: Any, axes: Any) -> Any:
    """Reverse some axes."""
    for axis in axes_of(emitter, x, axes) if axes else []:
        x = emitter.emit(op.flip(x, axis))
    return x


@converts("aten.repeat.default")
def repeat(emitter: Emitter, x: Any, repeats: Any) -> Any:
    """Tiles of the whole tensor."""
    shape = emitter.shape(x)
    extra = len(emitter.wanted.shape) - len(shape)

    def compute(a: Any, wanted: Any) -> Any:
        def element(*i: Any) -> Any:
            return a(*(tirx.floormod(j, n) for j, n in zip(i[extra:], a.shape, strict=True)))

        return te.compute(wanted, element, name="repeat")

    return emitter.te("repeat", compute, x, relax.ShapeExpr(emitter.wanted_shape))


@converts("aten.constant_pad_nd.default")
def constant_pad(emitter: Emitter, x: Any, pad: Any, value: Any = 0) -> Any:
    """Padding by a constant; negative padding cuts."""
    rank = len(emitter.shape(x))
    before: list[Any] = [0] * rank
    for k in range(len(pad) // 2):
        before[rank - 1 - k] = pad[2 * k]
    fill = tirx.const(value, emitter.dtype(x))

    def compute(a: Any, before: Any, wanted: Any) -> Any:
        def element(*i: Any) -> Any:
            place = [j - b for j, b in zip(i, before, strict=True)]
            inside = [
                c
                for p, n, b, w in zip(place, a.shape, before, wanted, strict=True)
                if not (isinstance(b, int) and b == 0 and w is n)
                for c in (p >= 0, p < n)
            ]
            return tirx.if_then_else(tirx.all(*inside), a(*place), fill) if inside else a(*place)

        return te.compute(wanted, element, name="pad")

    return emitter.te("pad", compute, x, before, relax.ShapeExpr(emitter.wanted_shape))


@converts("aten.unfold.default")
def unfold(emitter: Emitter, x: Any, axis: int, size: int, step: int) -> Any:
    """Windows of one axis, laid along a new last axis."""
    axis = axis_of(emitter, x, axis)

    def compute(a: Any, wanted: Any) -> Any:
        def element(*i: Any) -> Any:
            return a(*i[:axis], i[axis] * step + i[-1], *i[axis + 1 : -1])

        return te.compute(wanted, element, name="unfold")

    return emitter.te("unfold", compute, x, relax.ShapeExpr(emitter.wanted_shape))


@converts("aten.unfold_backward.default")
def unfold_backward(
    emitter: Emitter, grad: Any, sizes: Any, axis: int, size: int, step: int
) -> Any:
    """Gradient of windows: each element sums over the windows that hold it."""
    axis = axis + len(emitter.wanted.shape) if axis < 0 else axis

    def compute(g: Any, wanted: Any) -> Any:
        k = te.reduce_axis((0, tirx.IntImm("int64", size)), "k")

        def element(*i: Any) -> Any:
            start = i[axis] - k
            window = tirx.floordiv(start, step)
            there = tirx.all(start >= 0, tirx.floormod(start, step) == 0, window < g.shape[axis])
            value = g(*i[:axis], window, *i[axis + 1 :], k)
            return te.sum(tirx.if_then_else(there, value, tirx.const(0, g.dtype)), axis=k)

        return te.compute(wanted, element, name="unfold_backward")

    return emitter.te("unfold_backward", compute, grad, relax.ShapeExpr(emitter.wanted_shape))
