"""What is said of islands holds of arrays: random programs run twice, once with zeros for rows."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from relax_disc.analysis.padding.grid import NO_ROWS, Grid
from relax_disc.analysis.padding.islands import (
    EXACT,
    Partial,
    describe_island,
    laid_out,
    weights_of,
)
from relax_disc.analysis.padding.operators import Operand

BATCH, LENGTH, HEADS, WIDTH = 2, 4, 2, 3
NEEDED = np.array([[True, True, False, False], [True, False, True, False]])
SIZES = {"batch": BATCH, "length": LENGTH}


class Program:
    """A program over the padded batch, and the same over rows of which some are zeros."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.dims = {name: tirx.Var(name, "int64") for name in SIZES}
        self.grid = Grid(self.dims["batch"], [self.dims["length"]])
        self.values = []

    def var(self, shape):
        kind = relax.TensorType([self.dims.get(n, n) for n in shape], "float32")
        return relax.Var(f"x{len(self.values)}", kind)

    def put(self, var, known, wanted, found):
        self.values.append(SimpleNamespace(var=var, known=known, wanted=wanted, found=found))
        self.check(self.values[-1])
        return self.values[-1]

    def rows(self, is_zero):
        """Rows of the batch; those of a gradient are zero where they are not needed."""
        var = self.var(["batch", HEADS, "length", WIDTH])
        wanted = self.random.normal(size=(BATCH, HEADS, LENGTH, WIDTH))
        found = np.where(NEEDED[:, None, :, None], wanted, 0.0)
        known = laid_out(self.grid.rows(var.ty), is_zero)
        return self.put(var, known, found if is_zero else wanted, found)

    def whole(self, shape):
        value = self.random.normal(size=[SIZES.get(n, n) for n in shape])
        return self.put(self.var(shape), EXACT, value, value)

    def call(self, expr, operands, compute):
        """Add a call, if something is known of it."""
        call = relax.BlockBuilder().normalize(expr)
        given = [(Operand(x.var.ty, NO_ROWS, None), x.known) for x in operands]
        known = describe_island(call, given, self.grid)
        if known is None:
            return None
        wanted, found = (
            compute(*(getattr(x, side) for x in operands)) for side in ("wanted", "found")
        )
        return self.put(relax.Var(f"x{len(self.values)}", call.ty), known, wanted, found)

    def softmax(self, x):
        """Weights of keys of which those that are not needed are hidden, from needed queries."""
        if x.known.tracked - {2, 3} or x.known.batch not in ((0, 1), (-1, 1)):
            return None
        var = relax.Var(f"x{len(self.values)}", x.var.ty)
        made = []
        for side in ("wanted", "found"):
            scores = getattr(x, side) + np.where(NEEDED[:, None, None, :], 0.0, -1e30)
            # Of queries that are not needed any key may be seen.
            free = getattr(x, side) + np.where(NEEDED[:, None, None, ::-1], 0.0, -1e30)
            scores = np.where(NEEDED[:, None, :, None], scores, free)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            made.append(weights / weights.sum(-1, keepdims=True))
        known = weights_of(Partial((0, 1), x.known.partial, x.known.hollow, x.known.empty), 2, 3)
        return self.put(var, known, *made)

    def check(self, value):
        known, shape = value.known, value.wanted.shape
        assert np.isfinite(value.found).all()
        needed = {}
        if known.tracked:
            axis, parts = known.batch
            assert shape[axis] == BATCH * parts
            for each in known.tracked:
                assert shape[each] == LENGTH
                index = np.indices(shape, sparse=True)
                needed[each] = np.broadcast_to(NEEDED[index[axis] // parts, index[each]], shape)
        everywhere = np.ones(shape, bool)

        def all_of(axes):
            return np.logical_and.reduce([everywhere, *(needed[axis] for axis in axes)])

        np.testing.assert_allclose(
            value.wanted[all_of(known.partial)], value.found[all_of(known.partial)], atol=1e-9
        )
        for axis in known.hollow | known.empty:
            others = known.tracked - {axis} if axis in known.hollow else set()
            left = all_of(others) & ~needed[axis]
            for side in (value.wanted, value.found):
                np.testing.assert_allclose(side[left], 0.0, atol=1e-12)


def swap(x):
    return np.swapaxes(x, -1, -2)


def extents(x):
    return list(x.var.ty.shape.values)


@st.composite
def steps(draw):
    """What to do with which of the values so far, by numbers."""
    names = st.sampled_from([*STEPS] * 2 + ["product"] * 6 + ["softmax"] * 2 + ["multiply"] * 3)
    return draw(st.lists(st.tuples(names, st.integers(0, 99), st.integers(0, 99)), max_size=14))


def binary(name, compute):
    def step(program, x, y):
        ranks = len(extents(x)), len(extents(y))
        shapes = np.broadcast_shapes
        try:
            shapes(x.wanted.shape, y.wanted.shape)
            expr = getattr(relax.op, name)(x.var, y.var)
            relax.BlockBuilder().normalize(expr)
        except Exception:
            return None
        return program.call(expr, [x, y], compute) if min(ranks) else None

    return step


def product(program, x, y):
    for other, turned in ((y, False), (y, True)):
        if len(extents(x)) != len(extents(other)) or len(extents(x)) < 3:
            return None
        right = swap(other.wanted) if turned else other.wanted
        if x.wanted.shape[:-2] != right.shape[:-2] or x.wanted.shape[-1] != right.shape[-2]:
            continue
        if turned:
            rank = len(extents(other))
            axes = [*range(rank - 2), rank - 1, rank - 2]
            expr = relax.op.permute_dims(other.var, axes)
            other = program.call(expr, [other], swap)
        expr = relax.op.matmul(x.var, other.var)
        return program.call(expr, [x, other], np.matmul)
    return None


def turned(program, x, _):
    rank = len(extents(x))
    axes = [*range(rank - 2), rank - 1, rank - 2]
    return program.call(relax.op.permute_dims(x.var, axes), [x], swap)


def joined(program, x, _):
    """Batch and heads as one axis, or as two again."""
    b = program.dims["batch"]
    if len(extents(x)) == 4 and x.wanted.shape[:2] == (BATCH, HEADS):
        shape, sizes = [b * HEADS, *extents(x)[2:]], (BATCH * HEADS, *x.wanted.shape[2:])
    elif len(extents(x)) == 3 and x.wanted.shape[0] == BATCH * HEADS:
        shape, sizes = [b, HEADS, *extents(x)[1:]], (BATCH, HEADS, *x.wanted.shape[1:])
    else:
        return None
    return program.call(relax.op.reshape(x.var, shape), [x], lambda v: v.reshape(sizes))


def summed(axis):
    def step(program, x, _):
        if len(extents(x)) < 3:
            return None
        expr = relax.op.sum(x.var, axis=[axis], keepdims=True)
        return program.call(expr, [x], lambda v: v.sum(axis, keepdims=True))

    return step


STEPS = {
    "add": binary("add", np.add),
    "subtract": binary("subtract", np.subtract),
    "multiply": binary("multiply", np.multiply),
    "tanh": lambda p, x, _: p.call(relax.op.tanh(x.var), [x], np.tanh),
    "sigmoid": lambda p, x, _: p.call(relax.op.sigmoid(x.var), [x], lambda v: 1 / (1 + np.exp(-v))),
    "product": product,
    "softmax": lambda p, x, _: p.softmax(x) if x.wanted.shape[2:] == (LENGTH, LENGTH) else None,
    "turned": turned,
    "joined": joined,
    "summed": summed(-1),
    "summed over queries": summed(-2),
    "summed over sequences": summed(0),
}


@settings(max_examples=40, deadline=None)
@given(steps(), st.integers(0, 1000))
def test_what_is_said_holds(drawn, seed):
    run(drawn, seed)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(steps(), st.integers(0, 100000))
def test_what_is_said_holds_of_many(drawn, seed):
    run(drawn, seed)


def run(drawn, seed):
    program = Program(seed)
    for is_zero in (False, False, True):
        program.rows(is_zero)
    program.whole(["batch", HEADS, "length", "length"])
    for name, one, other in drawn:
        x, y = (program.values[-1 - k % len(program.values)] for k in (one, other))
        if np.abs(x.wanted).max(initial=0) < 1e3 and np.abs(y.wanted).max(initial=0) < 1e3:
            STEPS[name](program, x, y)


def test_attention_with_a_cap_is_an_island():
    """Forward and backward: what leaves it is packed again, and gradients are zero elsewhere."""
    program = Program(0)
    q, k, v, grad = (program.rows(is_zero) for is_zero in (False, False, False, True))
    turn = STEPS["turned"]
    scores = STEPS["tanh"](program, product(program, q, k), None)
    weights = program.softmax(scores)
    out = product(program, weights, v)
    rows = program.grid.rows(out.var.ty)
    assert out.known.fits_rows(rows) and not out.known.is_zero_at(rows)
    by_weights = product(program, grad, v)
    inner = STEPS["multiply"](program, by_weights, weights)
    total = STEPS["summed"](program, inner, None)
    by_scores = STEPS["subtract"](program, inner, STEPS["multiply"](program, weights, total))
    assert by_scores.known.is_exact
    gradients = [
        product(program, by_scores, k),
        product(program, turn(program, by_scores, None), q),
        product(program, turn(program, weights, None), grad),
    ]
    for each in gradients:
        assert each.known.is_zero_at(rows)


def test_a_sum_over_rows_that_are_not_zero_is_none():
    program = Program(0)
    q, k = program.rows(False), program.rows(False)
    scores = product(program, q, k)
    assert scores.known.partial == {2, 3}
    assert STEPS["summed"](program, scores, None) is None
    assert product(program, scores, k) is None
