"""The workspace that a plan counts is enough for every library kernel, and is all that it takes."""

import numpy as np
import pytest
import torch
import tvm_ffi
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relax_disc.ops.matmul import pack_axes
from relax_disc.ops.vocabulary_head import workspace_columns
from relax_disc.vm_builtins.libraries.install import install

install("llvm")

dtypes = st.sampled_from(["float32", "float64"])
extents = st.one_of(st.integers(1, 40), st.sampled_from([97, 280, 281, 385, 700, 1100, 1800]))


def call(formula, numbers, name, *arguments):
    """Call a kernel with the workspace of a formula; it must not use memory of its own."""
    own = tvm_ffi.get_global_func("relax_disc.cpu.own_workspace_bytes")
    size = tvm_ffi.get_global_func("relax_disc.cpu.workspace_bytes")(
        formula, tvm_ffi.Shape(numbers)
    )
    before = own()
    values = [tvm_ffi.from_dlpack(x) if isinstance(x, np.ndarray) else x for x in arguments]
    tvm_ffi.get_global_func("relax_disc.cpu.call_with_workspace")(
        size, tvm_ffi.get_global_func(f"relax_disc.cpu.{name}"), *values
    )
    assert own() == before
    return size


@given(m=extents, n=extents, k=extents, a=st.booleans(), b=st.booleans(), dtype=dtypes)
@settings(max_examples=60)
def test_matmul(m, n, k, a, b, dtype):
    left = np.ones((k, m) if a else (m, k), dtype)
    right = np.ones((n, k) if b else (k, n), dtype)
    out = np.empty((m, n), dtype)
    numbers = (out.itemsize, m, n, k)
    size = call("matmul", numbers, "matmul", left, right, 1, 1, int(a), int(b), out)
    np.testing.assert_array_equal(out, np.full((m, n), k, dtype))
    assert size <= 16 << 20


@given(
    sizes=st.tuples(*[st.integers(1, 5000)] * 3),
    parts=st.tuples(*[st.floats(0, 1)] * 3),
    item=st.sampled_from([4, 8]),
    threads=st.sampled_from([1, 2, 16]),
)
@example(sizes=(200, 64, 1024), parts=(0.9, 1.0, 1.0), item=4, threads=16)
@settings(max_examples=300)
def test_smaller_products_take_no_more(sizes, parts, item, threads):
    """A group of rows has as many as its data say: plans count those of all groups."""
    less = [max(1, int(size * part)) for size, part in zip(sizes, parts, strict=True)]
    bytes_of = tvm_ffi.get_global_func("relax_disc.cpu.workspace_bytes")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        few, many = (bytes_of("matmul", tvm_ffi.Shape([item, *x])) for x in (less, sizes))
    finally:
        torch.set_num_threads(before)
    assert few <= many


@given(count=st.integers(1, 9), m=extents, n=extents, k=extents, dtype=dtypes)
@settings(max_examples=30)
def test_batch_matmul(count, m, n, k, dtype):
    m, n = min(m, 300), min(n, 300)
    left, right = np.ones((count, m, k), dtype), np.ones((count, k, n), dtype)
    out = np.empty((count, m, n), dtype)
    axes = pack_axes(range(3))
    numbers = (out.itemsize, count, m, n, k)
    call("batch_matmul", numbers, "batch_matmul", left, right, axes, axes, axes, out)
    assert (out == k).all()


@given(
    rows=st.integers(1, 400),
    k=extents,
    n=extents,
    transposed=st.booleans(),
    dtype=dtypes,
    index=st.sampled_from(["int32", "int64"]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_grouped_products(rows, k, n, transposed, dtype, index, data):
    ends = np.sort(data.draw(st.lists(st.integers(0, rows), min_size=1, max_size=5))).astype(index)
    random = np.random.default_rng(rows)
    values = random.integers(-3, 4, (rows, k)).astype(dtype)
    grad = random.integers(-3, 4, (rows, n)).astype(dtype)
    shape = (len(ends), *((n, k) if transposed else (k, n)))
    matrices = random.integers(-3, 4, shape).astype(dtype)
    out, sums = np.full_like(grad, np.nan), np.full((len(ends), k, n), np.nan, dtype)
    item = out.itemsize
    arguments = values, matrices, ends, int(transposed), out
    call("matmul", (item, rows, n, k), "grouped_matmul", *arguments)
    call("matmul", (item, k, n, rows), "grouped_outer", values, grad, ends, sums)
    expected = np.zeros_like(grad)
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        matrix = matrices[expert].T if transposed else matrices[expert]
        expected[start:end] = values[start:end] @ matrix
        np.testing.assert_array_equal(sums[expert], values[start:end].T @ grad[start:end])
    np.testing.assert_array_equal(out, expected)


@given(length=st.integers(1, 500), key=st.integers(1, 64), value=st.integers(1, 64), dtype=dtypes)
@settings(max_examples=20)
def test_attention(length, key, value, dtype):
    q, k = (np.zeros((1, 3, length, key), dtype) for _ in range(2))
    v, out, lse = (np.ones((1, 3, length, width), dtype) for width in (value, value, 1))
    numbers = (out.itemsize, key, value)
    call("attention", numbers, "attention", q, k, v, 1.0, 1, 0, out, lse[..., 0])
    np.testing.assert_allclose(out, 1, rtol=1e-6)
    gradients = [np.full_like(x, np.nan) for x in (q, k, v)]
    arguments = (v, q, k, v, out, lse[..., 0], 1.0, 1, 0, *gradients)
    call("attention_backward", numbers, "attention_backward", *arguments)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@given(rows=st.integers(1, 300), classes=extents, width=extents, chunk=st.integers(1, 10))
@settings(max_examples=20)
def test_vocabulary_head(rows, classes, width, chunk):
    x, weight = np.zeros((rows, width), "float32"), np.ones((classes, width), "float32")
    target, grad = np.zeros(rows, "int64"), np.ones((), "float32")
    loss = np.empty((), "float32")
    results = (loss, np.empty_like(x), np.empty_like(weight))
    columns = workspace_columns(classes, width)
    chunks = np.empty((16 * chunk, columns), "float32")
    numbers = (4, rows, 16 * chunk, classes, width)
    arguments = (x, weight, target, grad, -100, 0.0, 1, *results, chunks)
    call("vocabulary_head", numbers, "vocabulary_head", *arguments)
    np.testing.assert_allclose(loss, np.log(classes), rtol=1e-5, atol=1e-6)
    lse = np.empty(rows, "float32")
    arguments = (x, weight, target, grad, np.ones_like(lse), 0, 0.0, 0, *results[:2], lse, chunks)
    call("vocabulary_head", numbers, "vocabulary_head_z_frozen", *arguments)
    np.testing.assert_allclose(lse, np.log(classes), rtol=1e-5, atol=1e-6)


@given(
    rows=st.integers(1, 2000),
    part=st.floats(0, 1),
    room=st.integers(1, 16),
    classes=st.integers(1, 100_000),
    width=st.integers(1, 8192),
)
@example(rows=2000, part=0.016, room=8, classes=32000, width=4096)
@settings(max_examples=100)
def test_heads_with_fewer_labels_take_no_more(rows, part, room, classes, width):
    bytes_of = tvm_ffi.get_global_func("relax_disc.cpu.workspace_bytes")
    few, many = (
        bytes_of("vocabulary_head", tvm_ffi.Shape([4, count, 16 * room, classes, width]))
        for count in (int(rows * part), rows)
    )
    assert few <= many


def test_a_workspace_that_is_too_small_is_refused():
    x = np.ones((50, 50), "float32")
    call_with = tvm_ffi.get_global_func("relax_disc.cpu.call_with_workspace")
    operands = [tvm_ffi.from_dlpack(x) for _ in range(2)]
    with pytest.raises(RuntimeError, match="bytes of workspace, planned were 64"):
        call_with(
            64,
            tvm_ffi.get_global_func("relax_disc.cpu.matmul"),
            *operands,
            1,
            1,
            0,
            0,
            tvm_ffi.from_dlpack(np.empty((50, 50), "float32")),
        )
