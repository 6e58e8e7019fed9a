"""Equal sizes are known without sympy's simplification, and unequal ones never taken for equal."""

import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from relax_disc.frontend.capture.tracing import _terms, tracing

H, W = sympy.symbols("h w", integer=True, positive=True)
LEAVES = st.sampled_from([H, W, (H - 1) // 2, (W + 1) // 2, *map(sympy.Integer, range(-3, 4))])
SIZES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.tuples(parts, parts).map(sum),
        st.tuples(parts, parts).map(lambda pair: pair[0] * pair[1]),
    ),
    max_leaves=6,
)


@given(SIZES, SIZES)
def test_sums_of_products_are_equal_where_their_difference_vanishes(left, right):
    for other in (right, sympy.expand(left), left + right - right):
        difference = sympy.expand(left - other)
        assert (_terms(left, {}) == _terms(other, {})) == (difference == 0)


def sizes_in_a_trace():
    env = ShapeEnv()
    example = torch.empty(5, 7)
    with FakeTensorMode(shape_env=env) as mode:
        fake = mode.from_tensor(example)
    return env, *fake.shape


def test_equal_strides_are_told_apart_from_others_without_a_guard():
    with tracing():
        env, h, w = sizes_in_a_trace()
        rows = (h - 1) // 2 + 1
        assert bool(64 * rows * w == w * (64 * ((h - 1) // 2) + 64))
        assert not bool(64 * rows * w != w * (64 * ((h - 1) // 2) + 64))
        assert not env.guards
        assert not bool(64 * rows * w == 64 * rows * h)
        assert env.guards
