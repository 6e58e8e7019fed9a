"""Random kernels: stages of TE beside the same formula in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tvm import te, tirx

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")
EXTENTS = {"n": N, "m": M, 1: 1, 3: 3, 20: 20}


@dataclass
class Value:
    """A tensor of the kernel: TE, and what numpy gets for sizes and inputs."""

    tensor: Any
    shape: tuple
    numpy: Any


@dataclass
class Generated:
    """A kernel with its inputs' shapes (in extents) and the numpy formula of each output."""

    func: tirx.PrimFunc
    inputs: list[tuple]
    outputs: list[Value]
    text: str

    def sizes(self, shape, n, m):
        return tuple({"n": n, "m": m}.get(extent, extent) for extent in shape)


def _te_shape(shape):
    return tuple(
        EXTENTS[extent] if isinstance(extent, str) else tirx.IntImm("int64", extent)
        for extent in shape
    )


UNARY = {
    "tanh": (tirx.tanh, np.tanh),
    "sigmoid": (tirx.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "exp_of_negative_square": (lambda x: tirx.exp(-(x * x)), lambda x: np.exp(-(x * x))),
    "half": (lambda x: x * 0.5, lambda x: x * 0.5),
    "positive": (lambda x: tirx.max(x, 0.0), lambda x: np.maximum(x, 0)),
}
BINARY = {
    "add": (lambda x, y: x + y, lambda x, y: x + y),
    "multiply": (lambda x, y: x * y, lambda x, y: x * y),
    "larger": (tirx.max, np.maximum),
    "choose": (
        lambda x, y: tirx.Select(x > y, x - y, y * 0.25),
        lambda x, y: np.where(x > y, x - y, y * 0.25),
    ),
}


def _pick(shape, indices):
    """Indices into an operand that broadcasts along its axes of extent 1."""
    zero = tirx.IntImm("int64", 0)
    return [zero if extent == 1 else index for extent, index in zip(shape, indices, strict=True)]


@st.composite
def generated(draw):
    """Draw a kernel."""
    rank = draw(st.integers(1, 3))
    domain = tuple(draw(st.sampled_from(["n", "m", 3, 20, 1])) for _ in range(rank))
    inputs = []
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(extent if draw(st.integers(0, 3)) else 1 for extent in domain)
        if index == 0:
            shape = domain
        inputs.append(shape)
    placeholders = [
        te.placeholder(_te_shape(shape), name=f"input{index}") for index, shape in enumerate(inputs)
    ]
    values = [
        Value(tensor, shape, lambda arrays, index=index: arrays[index])
        for index, (tensor, shape) in enumerate(zip(placeholders, inputs, strict=True))
    ]
    text = []
    for step in range(draw(st.integers(1, 5))):
        name = f"stage{step}"
        kinds = ["unary", "binary", "binary", "reduce", "transpose", "join", "turn", "gather"]
        kind = draw(st.sampled_from(kinds))
        made = _stage(draw, kind, values, name)
        if made is None:
            continue
        value, line = made
        text.append(f"{name} = {line} {value.shape}")
        values.append(value)
    stages = values[len(inputs) :]
    if not stages:
        x = values[0]
        stages = [_unary(x, "half", "stage")]
    outputs = [stages[-1]]
    for stage in stages[:-1]:
        if draw(st.integers(0, 3)) == 0:
            outputs.insert(0, stage)
    func = te.create_prim_func(placeholders + [value.tensor for value in outputs])
    func = func.with_attr("tirx.noalias", True)
    return Generated(func, inputs, outputs, "; ".join(text))


def _unary(x, which, name):
    compute, formula = UNARY[which]
    tensor = te.compute(_te_shape(x.shape), lambda *i: compute(x.tensor[i]), name=name)
    return Value(tensor, x.shape, lambda arrays: formula(x.numpy(arrays)))


def _stage(draw, kind, values, name):
    x = draw(st.sampled_from(values))
    if kind == "unary":
        which = draw(st.sampled_from(sorted(UNARY)))
        return _unary(x, which, name), which
    if kind == "binary":
        y = draw(st.sampled_from(values))
        if len(y.shape) != len(x.shape) or not all(
            a == b or 1 in (a, b) for a, b in zip(x.shape, y.shape, strict=True)
        ):
            return None
        shape = tuple(a if b == 1 else b for a, b in zip(x.shape, y.shape, strict=True))
        which = draw(st.sampled_from(sorted(BINARY)))
        compute, formula = BINARY[which]
        tensor = te.compute(
            _te_shape(shape),
            lambda *i: compute(
                x.tensor[tuple(_pick(x.shape, i))], y.tensor[tuple(_pick(y.shape, i))]
            ),
            name=name,
        )
        return Value(tensor, shape, lambda arrays: formula(x.numpy(arrays), y.numpy(arrays))), which
    if kind in ("join", "turn", "gather"):
        return _moved(draw, kind, x, name)
    if kind == "transpose":
        if len(x.shape) < 2:
            return None
        axes = draw(st.permutations(range(len(x.shape))))
        shape = tuple(x.shape[axis] for axis in axes)

        def moved(*i):
            source = [None] * len(axes)
            for at, axis in enumerate(axes):
                source[axis] = i[at]
            return x.tensor[tuple(source)]

        tensor = te.compute(_te_shape(shape), moved, name=name)
        return Value(tensor, shape, lambda arrays: x.numpy(arrays).transpose(axes)), f"move{axes}"
    return _reduction(draw, x, name)


def _moved(draw, kind, x, name):
    """Elements from elsewhere along one axis: a seam, an order turned round, a computed place."""
    axis = draw(st.integers(0, len(x.shape) - 1))
    extent = _te_shape(x.shape)[axis]

    def at(i, place):
        return x.tensor[(*i[:axis], place, *i[axis + 1 :])]

    if kind == "join":
        # The first element, then the others negated: a concatenation's condition.
        def element(*i):
            return tirx.if_then_else(i[axis] < 1, at(i, i[axis]) * 2.0, at(i, i[axis] - 1) * -1.0)

        def formula(array):
            first = np.take(array, [0], axis)
            moved = np.take(array, range(array.shape[axis] - 1), axis)
            return np.concatenate([first * 2.0, moved * -1.0], axis)
    elif kind == "turn":

        def element(*i):
            return at(i, extent - 1 - i[axis])

        def formula(array):
            return np.flip(array, axis)
    else:

        def element(*i):
            return at(i, tirx.floormod(i[axis] * 3 + 1, extent))

        def formula(array):
            size = array.shape[axis]
            return np.take(array, (np.arange(size) * 3 + 1) % size, axis)

    tensor = te.compute(_te_shape(x.shape), element, name=name)
    return Value(tensor, x.shape, lambda arrays: formula(x.numpy(arrays))), f"{kind}[{axis}]"


def _reduction(draw, x, name):
    rank = len(x.shape)
    axes = draw(st.sets(st.integers(0, rank - 1), min_size=1))
    if draw(st.booleans()):
        axes = {rank - 1}
    reduced = {axis: te.reduce_axis((0, _te_shape(x.shape)[axis]), f"k{axis}") for axis in axes}
    combine, formula = draw(st.sampled_from([(te.sum, np.sum), (te.max, np.max)]))
    shape = tuple(1 if axis in axes else extent for axis, extent in enumerate(x.shape))

    def element(*i):
        source = tuple(reduced.get(axis, i[axis]) for axis in range(rank))
        return combine(x.tensor[source], axis=list(reduced.values()))

    tensor = te.compute(_te_shape(shape), element, name=name)
    value = Value(
        tensor, shape, lambda arrays: formula(x.numpy(arrays), tuple(axes), keepdims=True)
    )
    return value, f"{formula.__name__}{sorted(axes)}"
