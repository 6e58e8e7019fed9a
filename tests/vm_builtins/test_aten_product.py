"""Products by PyTorch's kernels against float64, and the workspace that plans count."""

import math

import pytest
import torch
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_disc.ops.matmul import pack_axes
from relax_disc.vm_builtins.libraries.install import install
from tests.thread_count import threads

install("cpu")
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
extents = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 97, 280, 513, 768, 1376]))


def run(name, formula, sizes, tensors, numbers):
    """Call a kernel with the workspace that a plan would lend it; it must be enough."""
    size = tvm_ffi.get_global_func("relax_disc.cpu.workspace_bytes")(
        formula,
        tvm_ffi.Shape([tensors[0].element_size(), *sizes, int(tensors[0].dtype == torch.bfloat16)]),
    )
    *operands, result = (tvm_ffi.from_dlpack(t) for t in tensors)
    overflow = tvm_ffi.get_global_func("relax_disc.cpu.take_overflow")
    overflow()
    tvm_ffi.get_global_func("relax_disc.cpu.call_with_workspace")(
        size, tvm_ffi.get_global_func(f"relax_disc.cpu.{name}"), *operands, *numbers, result
    )
    assert overflow() == 0
    return size


def random(*shape, dtype):
    generator = torch.Generator().manual_seed(hash(shape) % 2**31)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_rounded_once(found, exact, magnitude, dtype):
    """Sums in float32, then one rounding of the result."""
    bound = ROUNDING[dtype] * exact.abs() + 2**-18 * magnitude
    assert ((found.double() - exact).abs() <= bound).all()


@given(
    m=extents,
    n=extents,
    k=extents,
    transpose_a=st.booleans(),
    transpose_b=st.booleans(),
    addend=st.sampled_from(["none", "row", "full"]),
    dtype=st.sampled_from(list(ROUNDING)),
    count=st.sampled_from([1, 2]),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_matrices(m, n, k, transpose_a, transpose_b, addend, dtype, count):
    a = random(*((k, m) if transpose_a else (m, k)), dtype=dtype)
    b = random(*((n, k) if transpose_b else (k, n)), dtype=dtype)
    left, right = (a.T if transpose_a else a), (b.T if transpose_b else b)
    exact = left.double() @ right.double()
    magnitude = left.double().abs() @ right.double().abs()
    out = torch.full((m, n), math.nan, dtype=dtype)
    flags = (1, 1, int(transpose_a), int(transpose_b))
    extra = {"none": [], "row": [random(n, dtype=dtype)], "full": [random(m, n, dtype=dtype)]}
    name = "aten_matmul" if addend == "none" else "aten_matmul_add"
    for x in extra[addend]:
        exact, magnitude = exact + x.double(), magnitude + x.double().abs()
    with threads(count):
        run(name, "aten_matmul", (m, n, k), [a, b, *extra[addend], out], flags)
        again = torch.empty_like(out)
        run(name, "aten_matmul", (m, n, k), [a, b, *extra[addend], again], flags)
    assert_rounded_once(out, exact, magnitude, dtype)
    assert torch.equal(out, again)


# Without instructions for bfloat16 PyTorch takes minutes, and a step multiplies in float32.
MULTIPLIES = tvm_ffi.get_global_func("relax_disc.cpu.multiplies")("bfloat16")
LARGEST = pytest.param((3072, 768, 4096), marks=[] if MULTIPLIES else [pytest.mark.slow])


@pytest.mark.parametrize("sizes", [LARGEST, (512, 402, 7583), (64, 64, 32768)])
def test_large_products_stay_inside_their_workspace(sizes):
    m, n, k = sizes
    for count in (1, 2):
        a, b = torch.ones(k, m).bfloat16(), torch.ones(n, k).bfloat16()
        out = torch.empty(m, n).bfloat16()
        with threads(count):
            size = run("aten_matmul", "aten_matmul", sizes, [a, b, out], (1, 1, 1, 1))
        assert size <= count << 23
        assert (out == torch.tensor(k).bfloat16()).all()


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(
    ("a_shape", "b_shape", "a_axes", "b_axes", "c_axes"),
    [
        ((5, 12, 7), (5, 7, 9), (0, 1, 2), (0, 1, 2), (0, 1, 2)),
        ((3, 12, 4, 16), (3, 12, 4, 16), (0, 2, 1, 3), (0, 2, 3, 1), (0, 1, 2, 3)),
        ((3, 4, 12, 10), (3, 10, 4, 16), (0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 1, 3)),
        ((3, 1, 12, 8), (4, 8, 6), (0, 1, 2, 3), (0, 1, 2), (0, 1, 2, 3)),
    ],
)
def test_batches(a_shape, b_shape, a_axes, b_axes, c_axes, dtype):
    a, b = random(*a_shape, dtype=dtype), random(*b_shape, dtype=dtype)
    left, right = a.permute(a_axes).double(), b.permute(b_axes).double()
    exact = left @ right
    stored = [exact.shape[c_axes.index(axis)] for axis in range(exact.dim())]
    out = torch.full(stored, math.nan, dtype=dtype)
    m, n, k = *exact.shape[-2:], left.shape[-1]
    run(
        "aten_batch_matmul",
        "aten_batch_matmul",
        (exact.numel() // (m * n), m, n, k),
        [a, b, out],
        [pack_axes(axes) for axes in (a_axes, b_axes, c_axes)],
    )
    assert_rounded_once(out.permute(c_axes), exact, left.abs() @ right.abs(), dtype)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_products(m, n, k):
    a, b = torch.ones(m, k).bfloat16(), torch.ones(k, n).bfloat16()
    out = torch.full((m, n), math.nan).bfloat16()
    run("aten_matmul", "aten_matmul", (m, n, k), [a, b, out], (1, 1, 0, 0))
    assert (out == 0).all()
    row = torch.ones(n).bfloat16()
    run("aten_matmul_add", "aten_matmul", (m, n, k), [a, b, row, out], (1, 1, 0, 0))
    assert (out == 1).all()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(4096, 324, 2048), (4096, 768, 3072), (300, 1001, 4096), (70, 4, 8192)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_long_sums_of_bfloat16_take_a_few_rows_at_a_time(m, n, k, threads):
    """oneDNN adds them up in float32, of all rows: 13 MB of the second."""
    a, b = torch.ones(m, k, dtype=torch.bfloat16), torch.ones(n, k, dtype=torch.bfloat16)
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        size = run("aten_matmul", "aten_matmul", (m, n, k), [a, b, out], (1, 1, 0, 1))
    finally:
        torch.set_num_threads(before)
    assert (out == k).all()
    assert size <= (4 + 4 * threads) << 20
