"""Library kernels against numpy in float64."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_disc.ops.matmul import pack_axes
from tests.thread_count import threads
from tests.vm_builtins.library_calls import LIBRARIES, call

dtypes = st.sampled_from(["float32", "float64"])


def tolerance(dtype):
    return 2e-6 if dtype == "float32" else 1e-14


def assert_near(ours, exact, dtype, scale=None):
    scale = (np.abs(exact).max(initial=0) if scale is None else scale) + 1e-30
    np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance(dtype) * scale)


# Extents around the register tiles (14 x 32), the depth blocks (384) and the sharing over threads.
extents = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 97, 280, 383, 385, 700]))


@pytest.mark.parametrize("kind", LIBRARIES)
@given(
    m=extents,
    n=extents,
    k=extents,
    transpose_a=st.booleans(),
    transpose_b=st.booleans(),
    addend=st.sampled_from(["none", "row", "full"]),
    dtype=dtypes,
    seed=st.integers(0, 99),
)
@settings(max_examples=100)
def test_matmul(kind, m, n, k, transpose_a, transpose_b, addend, dtype, seed):
    generator = np.random.default_rng(seed)
    a = generator.standard_normal((k, m) if transpose_a else (m, k)).astype(dtype)
    b = generator.standard_normal((n, k) if transpose_b else (k, n)).astype(dtype)
    c = np.full((m, n), np.nan, dtype)
    flags = (1, 1, int(transpose_a), int(transpose_b))
    left, right = (a.T if transpose_a else a), (b.T if transpose_b else b)
    exact = left.astype("float64") @ right.astype("float64")
    if addend == "none":
        call(kind, "matmul", a, b, *flags, c)
    else:
        extra = generator.standard_normal((n,) if addend == "row" else (m, n)).astype(dtype)
        exact = exact + extra
        call(kind, "matmul_add", a, b, extra, *flags, c)
    bound = np.abs(left) @ np.abs(right) if k else np.zeros(())
    assert_near(c, exact, dtype, bound.max(initial=0) + 1)


@pytest.mark.parametrize("m", [1, 15, 300])
@pytest.mark.parametrize("k", [3, 500])
def test_a_sum_may_be_written_over_its_addend(m, k):
    generator = np.random.default_rng(0)
    a = generator.standard_normal((m, k)).astype("float32")
    b = generator.standard_normal((k, 37)).astype("float32")
    extra = generator.standard_normal((m, 37)).astype("float32")
    apart = np.empty((m, 37), "float32")
    call("native", "matmul_add", a, b, extra, 1, 1, 0, 0, apart)
    call("native", "matmul_add", a, b, extra, 1, 1, 0, 0, extra)
    np.testing.assert_array_equal(extra, apart)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_operands_of_any_rank(kind):
    generator = np.random.default_rng(0)
    a = generator.standard_normal((2, 3, 4, 5)).astype("float32")
    b = generator.standard_normal((7, 2, 10)).astype("float32")
    c = np.empty((2, 3, 7), "float32")
    call(kind, "matmul", a, b, 2, 1, 0, 1, c)
    exact = a.reshape(6, 20).astype("float64") @ b.reshape(7, 20).T
    assert_near(c.reshape(6, 7), exact, "float32", 20)
    vector = np.empty((6,), "float32")
    call(kind, "matmul", a, b[0].copy(), 2, 2, 0, 0, vector)
    assert_near(vector, a.reshape(6, 20).astype("float64") @ b[0].reshape(20), "float32", 20)


@pytest.mark.parametrize("kind", LIBRARIES)
@given(data=st.data(), dtype=dtypes)
@settings(max_examples=60)
def test_batch_matmul(kind, data, dtype):
    small = st.integers(0, 3)
    batch = data.draw(st.lists(small, min_size=1, max_size=3))
    m, n, k = (data.draw(st.sampled_from([0, 1, 2, 15, 33, 70])) for _ in range(3))
    generator = np.random.default_rng(0)

    def operand(rows, columns, free_columns):
        """An array stored with permuted axes: its logical view, itself, and the code of axes."""
        leading = [data.draw(st.sampled_from([1, size])) for size in batch]
        leading = leading[data.draw(st.integers(0, len(batch))) :]
        shape = [*leading, rows, columns]
        order = data.draw(st.permutations(range(len(shape)))) if free_columns else None
        if order is None:
            order = [*data.draw(st.permutations(range(len(shape) - 1))), len(shape) - 1]
        stored = generator.standard_normal([shape[axis] for axis in order]).astype(dtype)
        inverse = [order.index(axis) for axis in range(len(shape))]
        return stored.transpose(inverse), stored, pack_axes(inverse)

    left, a, a_axes = operand(m, k, True)
    right, b, b_axes = operand(k, n, True)
    shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), m, n)
    order = [*data.draw(st.permutations(range(len(shape) - 1))), len(shape) - 1]
    c = np.full([shape[axis] for axis in order], np.nan, dtype)
    inverse = [order.index(axis) for axis in range(len(shape))]
    call(kind, "batch_matmul", a, b, a_axes, b_axes, pack_axes(inverse), c)
    exact = left.astype("float64") @ right.astype("float64")
    assert_near(c.transpose(inverse), exact, dtype, k + 10)


@given(m=st.integers(1, 200), n=st.integers(1, 200), k=st.integers(1, 900))
@settings(max_examples=25)
def test_results_depend_on_neither_threads_nor_other_rows(m, n, k):
    generator = np.random.default_rng(0)
    a = generator.standard_normal((m, k)).astype("float32")
    b = generator.standard_normal((k, n)).astype("float32")
    results = []
    for count in (1, 2, 5, 2):
        c = np.empty((m, n), "float32")
        with threads(count):
            call("native", "matmul", a, b, 1, 1, 0, 0, c)
        results.append(c)
    for one, other in pairwise(results):
        np.testing.assert_array_equal(one, other)
    row = np.empty((1, n), "float32")
    call("native", "matmul", a[m // 2 : m // 2 + 1].copy(), b, 1, 1, 0, 0, row)
    np.testing.assert_array_equal(row[0], results[0][m // 2])


def test_shapes_that_do_not_fit_are_refused():
    a, c = np.zeros((3, 4), "float32"), np.zeros((3, 3), "float32")
    with pytest.raises(ValueError, match="matmul"):
        call("native", "matmul", a, a, 1, 1, 0, 0, c)
    with pytest.raises(TypeError, match="expected elements"):
        call("native", "matmul", a, a.astype("float64"), 1, 1, 0, 1, c)


@pytest.mark.parametrize("kind", LIBRARIES)
@given(
    count=st.integers(0, 60),
    rows=st.integers(1, 12),
    dim=st.sampled_from([1, 5, 16, 100, 700]),
    padding_idx=st.integers(-1, 3),
    index=st.sampled_from(["int32", "int64"]),
    dtype=dtypes,
    onto=st.sampled_from(["nothing", "another", "itself"]),
)
@settings(max_examples=60)
def test_embedding_backward(kind, count, rows, dim, padding_idx, index, dtype, onto):
    generator = np.random.default_rng(count)
    grad = generator.standard_normal((count, dim)).astype(dtype)
    ids = generator.integers(0, rows, count).astype(index)
    out = np.full((rows, dim), np.nan, dtype)
    expected = np.zeros((rows, dim), dtype)
    if onto == "nothing":
        call(kind, "embedding_backward", grad, ids, padding_idx, out)
    else:
        addend = generator.standard_normal((rows, dim)).astype(dtype)
        expected[...] = addend
        if onto == "itself":
            out = addend
        call(kind, "embedding_backward_add", grad, ids, addend, padding_idx, out)
    for i in range(count):
        if ids[i] != padding_idx:
            expected[ids[i]] += grad[i]
    if kind == "torch" and onto != "nothing":  # sums the rows before it adds them
        tolerance = 1e-5 if dtype == "float32" else 1e-12
        np.testing.assert_allclose(out, expected, tolerance, tolerance)
    else:
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("padding_idx", [-1, 4])
@pytest.mark.parametrize("onto", [False, True])
def test_rows_of_a_table_are_those_of_the_whole_one(onto, padding_idx):
    generator = np.random.default_rng(0)
    grad = generator.standard_normal((40, 33)).astype("float32")
    ids = generator.integers(0, 11, 40)
    addend = generator.standard_normal((11, 33)).astype("float32")
    name = f"embedding_backward{'_add' if onto else ''}"
    expected = np.empty_like(addend)
    call("native", name, grad, ids, *([addend] if onto else []), padding_idx, expected)
    for begin, end in ((0, 4), (4, 5), (5, 11)):
        out = addend[begin:end].copy()  # where the sum takes the place of the other gradient
        numbers = [padding_idx, begin, 11]
        call("native", f"{name}_rows", grad, ids, *([out] if onto else []), *numbers, out)
        np.testing.assert_array_equal(out, expected[begin:end])


def test_ids_outside_the_table_write_nothing():
    out = np.full((3, 4), 7, "float32")
    with pytest.raises(IndexError, match="id 3 at 1"):
        call("native", "embedding_backward", np.ones((2, 4), "float32"), np.array([0, 3]), -1, out)
    assert (out == 7).all()
