"""Convolutions of the library against PyTorch in float64, and the workspace that plans count."""

import math

import pytest
import torch
import tvm_ffi
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relax_disc.ops import registry
from relax_disc.vm_builtins import native
from relax_disc.vm_builtins.libraries import cuda_library
from relax_disc.vm_builtins.libraries.install import install
from tests.thread_count import threads as on_threads

install("cpu")
CONVOLUTION = torch.ops.aten.convolution
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class View:
    def __init__(self, tensor):
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def run(name, tensors, numbers):
    """Call a kernel with the workspace that a plan would lend it; it must be enough."""
    formula, parameters = registry.LIBRARY[name].workspace([View(t) for t in tensors], numbers)
    size = tvm_ffi.get_global_func("relax_disc.cpu.workspace_bytes")(
        formula, tvm_ffi.Shape([tensors[0].element_size(), *parameters])
    )
    *operands, result = (tvm_ffi.from_dlpack(t) for t in tensors)
    overflow = tvm_ffi.get_global_func("relax_disc.cpu.take_overflow")
    own = tvm_ffi.get_global_func("relax_disc.cpu.own_workspace_bytes")
    overflow()
    before = own()
    tvm_ffi.get_global_func("relax_disc.cpu.call_with_workspace")(
        size, tvm_ffi.get_global_func(f"relax_disc.cpu.{name}"), *operands, *numbers, result
    )
    assert own() == before
    return overflow(), size


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-6))


def check(batch, inner, outer, groups, space, kernel, stride, padding, dilation, dtype):
    """All three kernels of one geometry; returns the overflow and the planned size of each."""
    rank = len(space)
    there = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(space, padding, dilation, kernel, stride, strict=True)
    ]
    if min(there) < 1:
        return []
    generator = torch.Generator().manual_seed(hash((batch, inner, outer, *space)) % 2**31)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight, bias = (
        random(batch, *space, inner),
        random(outer, inner // groups, *kernel),
        random(outer),
    )
    grad = random(batch, *there, outer)
    numbers = [*stride, *padding, *dilation, groups]
    out, dx, dw = (torch.full_like(t, math.nan) for t in (grad, x, weight))
    taken = [
        run("convolution_bias", [x, weight, bias, out], numbers),
        run("convolution_input", [grad, weight, dx], numbers),
        run("convolution_weight", [grad, x, dw], numbers),
    ]
    exact_x = x.movedim(-1, 1).double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    exact = CONVOLUTION(
        exact_x, exact_weight, bias.double(), stride, padding, dilation, False, [0] * rank, groups
    )
    exact.backward(grad.movedim(-1, 1).double())
    found = (out.movedim(-1, 1), dx.movedim(-1, 1), dw)
    for mine, theirs in zip(found, (exact, exact_x.grad, exact_weight.grad), strict=True):
        assert error(mine, theirs.detach()) < TOLERANCE[dtype]
    return taken


def check_inside(*geometry):
    """...and that each takes no more than is planned; returns the planned sizes."""
    taken = check(*geometry)
    assert all(overflow == 0 for overflow, _ in taken)
    return [size for _, size in taken]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("inner", "outer", "groups", "space", "kernel", "stride", "padding", "dilation"),
    [
        (3, 16, 1, (33, 40), (7, 7), (2, 2), (3, 3), (1, 1)),
        (64, 64, 1, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1)),
        (32, 48, 1, (9, 11), (1, 1), (1, 1), (0, 0), (1, 1)),
        (32, 32, 32, (15, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
        (128, 128, 128, (2, 3), (3, 3), (1, 1), (1, 1), (1, 1)),
        (128, 128, 128, (3, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
        (24, 48, 4, (8, 12), (3, 5), (1, 1), (1, 2), (1, 1)),
        (1, 1, 1, (9, 13), (3, 3), (1, 1), (1, 1), (1, 1)),
        (8, 12, 1, (20, 21), (3, 3), (1, 1), (2, 2), (2, 2)),
        (16, 24, 1, (50,), (5,), (2,), (2,), (1,)),
        (48, 211, 1, (30, 64), (1, 64), (1, 1), (0, 0), (1, 1)),
        (6, 10, 2, (5, 8, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        (32, 24, 1, (80, 80), (1, 1), (2, 2), (0, 0), (1, 1)),
        (40, 10, 1, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1)),
        (20, 130, 1, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
        (24, 72, 1, (7, 5), (3, 2), (2, 3), (2, 1), (1, 2)),
        (24, 150, 1, (4, 3), (1, 1), (1, 1), (0, 0), (1, 1)),
        (24, 64, 1, (4, 3), (1, 1), (2, 1), (0, 1), (1, 1)),
        (16, 128, 1, (9,), (5,), (2,), (2,), (1,)),
        (256, 256, 1, (389,), (3,), (2,), (0,), (1,)),
        (256, 512, 2, (1279,), (2,), (5,), (1,), (1,)),
        (192, 48, 1, (300,), (2,), (4,), (1,), (1,)),
        (3, 32, 1, (48, 32), (16, 16), (16, 16), (0, 0), (1, 1)),
        (8, 100, 1, (3, 4, 2), (3, 3, 2), (2, 1, 1), (1, 1, 0), (1, 1, 1)),
        (96, 64, 2, (150,), (20,), (1,), (10,), (1,)),
        (64, 72, 1, (1100,), (3,), (1,), (3,), (4,)),
        (32, 40, 1, (90,), (9,), (3,), (4,), (2,)),  # weight and a batch are as large
        # oneDNN sums the weight's gradient wrongly on AVX2 (in PyTorch, too, channels last).
        (3, 16, 1, (16, 16), (1, 1), (2, 2), (0, 0), (1, 1)),
        (5, 3, 1, (4, 16), (1, 1), (2, 1), (0, 0), (1, 1)),
        (4, 32, 1, (18, 16), (1, 1), (2, 1), (0, 0), (1, 1)),
        (3, 1, 1, (16,), (1,), (2,), (0,), (1,)),
    ],
)
def test_kernels(inner, outer, groups, space, kernel, stride, padding, dilation, dtype):
    for batch in (1, 4):
        taken = check(batch, inner, outer, groups, space, kernel, stride, padding, dilation, dtype)
        for overflow, size in taken:
            assert overflow == 0
            assert size <= 64 << 20


def test_threads_sum_large_gradients_of_unusual_windows_apart():
    with on_threads(2):
        taken = check(8, 384, 384, 1, (16, 16), (2, 5), (2, 1), (0, 0), (4, 1), torch.float32)
    assert [overflow for overflow, _ in taken] == [0, 0, 0]


@given(data=st.data())
@settings(max_examples=40)
def test_whole_steps_of_channels(data):
    """Matrix tiles compute them where the processor has some."""
    channels = st.sampled_from([64, 96, 160])
    rank = data.draw(st.sampled_from([1, 2, 2]))

    def each(least, most):
        return tuple(data.draw(st.integers(least, most)) for _ in range(rank))

    # More positions than channels: else windows are written out.
    space = (300,) if rank == 1 else data.draw(st.sampled_from([(14, 19), (21, 12)]))
    geometry = (each(1, 4), each(1, 2), each(0, 4), each(1, 2))
    batch, inner, outer = data.draw(st.integers(1, 3)), data.draw(channels), data.draw(channels)
    for threads in (1, 3):
        with on_threads(threads):
            taken = check(batch, inner, outer, 1, space, *geometry, torch.float32)
        assert all(overflow == 0 for overflow, _ in taken)


@pytest.mark.parametrize("threads", [1, 2])
def test_few_positions_take_no_more_than_their_windows(threads):
    """oneDNN would take the weight in its own order, once or twice: 2.3 MiB each."""
    with on_threads(threads):
        taken = check(2, 256, 256, 1, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1), torch.float32)
    windows = 4 * 2 * 6 * 7 * 256 * 9
    # Beside the windows: the packed blocks of a product.
    for overflow, size in taken:
        assert overflow == 0
        assert windows < size < windows + (3 << 20) + threads * (1 << 19)


@pytest.mark.parametrize(("batch", "groups"), [(1, 4), (3, 4), (40, 1)])
def test_wide_windows_along_a_line_take_one_group_of_a_few_samples(batch, groups):
    """As in Wav2Vec2; by oneDNN the gradient of this weight alone takes 12 times the weight."""
    channels, length, taps = 64 * groups, 60, 32
    taken = check(
        batch, channels, channels, groups, (length,), (taps,), (1,), (16,), (1,), torch.float32
    )
    windows = 4 * (length + 1) * 64 * taps
    weight = 4 * 64 * 64 * taps  # of a group
    for overflow, size in taken:
        assert overflow == 0
        assert size < 3 * windows + weight + (1 << 19) * torch.get_num_threads()


@pytest.mark.parametrize(
    ("space", "kernel", "numbers", "groups"),
    [
        ((9, 11), (3, 3), [2, 1, 1, 1, 1, 2], 2),
        ((30,), (5,), [2, 2, 1], 1),
        ((5, 6, 7), (3, 1, 3), [1, 2, 1, 1, 0, 1, 1, 1, 1], 4),
    ],
)
def test_the_library_for_cuda_computes_the_same(space, kernel, numbers, groups):
    """Its functions are PyTorch's, which run on the CPU's tensors too."""
    rank = len(space)
    stride, padding, dilation = (numbers[k * rank : (k + 1) * rank] for k in range(3))
    x, weight, bias = (
        torch.randn(2, *space, 8),
        torch.randn(12, 8 // groups, *kernel),
        torch.ones(12),
    )
    leaves = x.movedim(-1, 1).double().requires_grad_(), weight.double().requires_grad_()
    exact = CONVOLUTION(
        *leaves, bias.double(), stride, padding, dilation, False, [0] * rank, groups
    )
    grad = torch.randn(exact.movedim(1, -1).shape)
    exact.backward(grad.movedim(-1, 1).double())

    def call(name, *tensors):
        arguments = [tvm_ffi.from_dlpack(t) for t in tensors]
        cuda_library.FUNCTIONS[name](*arguments[:-1], *numbers, groups, arguments[-1])
        return tensors[-1]

    out = call("convolution_bias", x, weight, bias, torch.full_like(grad, math.nan))
    plain = call("convolution", x, weight, torch.full_like(grad, math.nan))
    dx = call("convolution_input", grad, weight, torch.full_like(x, math.nan))
    dw = call("convolution_weight", grad, x, torch.full_like(weight, math.nan))
    assert error(out, exact.detach().movedim(1, -1)) < 2e-5
    torch.testing.assert_close(plain + bias, out)
    assert error(dx.movedim(-1, 1), leaves[0].grad) < 2e-5
    assert error(dw, leaves[1].grad) < 2e-5


@st.composite
def geometries(draw, wide=False):
    rank = draw(st.integers(1, 3))
    most = {1: 200, 2: 40, 3: 12}[rank]

    def each(elements):
        return tuple(draw(elements) for _ in range(rank))

    groups = draw(st.sampled_from([1, 1, 1, 2, 4, 8]))
    inner, outer = (groups * draw(st.sampled_from([1, 3, 8, 16])) for _ in range(2))
    windows = [1, 2, 3, 4, 7, 11, 16][: 4 if rank == 3 else 7] if wide else [1, 3, 5]
    kernel, dilation = each(st.sampled_from(windows)), each(st.sampled_from([1, 1, 2]))
    padding = tuple(
        draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True)
    )
    space = each(st.integers(1, most))
    stride = each(st.sampled_from([1, 1, 2, 3, 4, 8, 16] if wide else [1, 1, 2, 3]))
    return inner, outer, groups, space, kernel, stride, padding, dilation


@given(geometry=geometries(), batch=st.integers(1, 5))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_geometry_stays_inside_its_workspace(geometry, batch):
    check_inside(batch, *geometry, torch.float32)


def is_crash_of_onednn(space, kernel, padding, dilation):
    """Windows of which nothing may lie inside: PyTorch itself ends in tiles with a fault."""
    return any(
        d > 1 and n + p < d * (k - 1) + 1
        for n, k, p, d in zip(space, kernel, padding, dilation, strict=True)
    )


@given(geometry=geometries(wide=True), batch=st.integers(1, 5), threads=st.integers(1, 3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_geometry_of_bfloat16_stays_inside_its_workspace(geometry, batch, threads):
    _, _, _, space, kernel, _, padding, dilation = geometry
    assume(not is_crash_of_onednn(space, kernel, padding, dilation))
    with on_threads(threads):
        check_inside(batch, *geometry, torch.bfloat16)


WRONG_IN_ONEDNN = [
    (3, 1, 8, 1, (6, 3), (3, 3), (1, 3), (0, 1), (1, 1)),
    (3, 1, 1, 1, (47, 25), (17, 24), (1, 3), (0, 0), (1, 1)),
    (1, 1, 1, 1, (31, 35, 18), (1, 32, 3), (3, 1, 1), (0, 0, 0), (2, 1, 1)),
    (1, 1, 64, 1, (31, 31, 18), (1, 1, 3), (3, 1, 1), (0, 0, 1), (2, 2, 1)),
    (3, 128, 32, 4, (8, 15), (5, 15), (3, 1), (0, 0), (1, 1)),
    (3, 4, 128, 4, (7, 3, 6), (7, 2, 3), (2, 1, 3), (3, 0, 0), (1, 1, 1)),
    (9, 8, 32, 4, (8, 33, 2), (8, 3, 1), (3, 1, 2), (4, 0, 0), (1, 1, 1)),
    (8, 48, 96, 1, (132, 2), (1, 1), (3, 3), (0, 1), (4, 4)),
    (2, 48, 96, 1, (2, 40), (1, 1), (4, 4), (1, 1), (1, 1)),
]
"""In float32, with AVX-512; PyTorch itself gives other numbers, what lay in memory, or ends."""


@pytest.mark.parametrize("geometry", WRONG_IN_ONEDNN)
def test_what_onednn_computes_wrongly_is_computed_otherwise(geometry):
    check_inside(*geometry, torch.float32)


HAS_VECTORS = "avx512bw" in native.processor_flags() and "amx_bf16" not in native.processor_flags()
WITHOUT_TILES = pytest.mark.skipif(
    not HAS_VECTORS, reason="of processors with AVX-512 and no matrix tiles"
)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=WITHOUT_TILES)], ids=str
)
@pytest.mark.parametrize(
    "geometry",
    [
        (4, 64, 64, 1, (48, 40), (3, 3), (1, 1), (1, 1), (1, 1)),
        (2, 12, 256, 1, (64, 56), (1, 1), (1, 1), (0, 0), (1, 1)),
        (1, 80, 16, 1, (64, 96), (1, 1), (1, 1), (1, 1), (1, 1)),
        (2, 80, 16, 1, (2000,), (5,), (1,), (2,), (1,)),
        (8, 48, 12, 1, (2001,), (3,), (1,), (0,), (1,)),
        (2, 256, 256, 256, (301,), (3,), (2,), (2,), (1,)),
        (1, 192, 192, 192, (24, 8), (3, 1), (2, 2), (1, 0), (1, 1)),
        (1, 384, 384, 384, (4, 2), (3, 3), (2, 2), (0, 2), (1, 1)),
        (3, 512, 48, 1, (16, 24), (3, 3), (2, 2), (1, 1), (1, 1)),
        (1, 192, 512, 4, (16, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
        (1, 1, 24, 1, (132, 112), (11, 11), (4, 4), (5, 5), (1, 1)),
        (2, 192, 48, 1, (56, 2), (2, 2), (1, 2), (0, 0), (1, 1)),
        (4, 192, 96, 1, (8, 96), (3, 1), (9, 9), (0, 1), (1, 1)),
        (8, 128, 64, 1, (28, 56), (3, 3), (3, 3), (4, 4), (4, 4)),
    ],
)
def test_full_sizes_stay_inside_their_workspace(geometry, dtype, threads):
    with on_threads(threads):
        check_inside(*geometry, dtype)


CHANNELS = [1, 3, 5, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512]
EXTENTS = [1, 2, 4, 7, 8, 13, 14, 16, 24, 28, 32, 40, 48, 56, 64, 96, 112, 132]


@st.composite
def full_sizes(draw):
    """As layers of networks are; most pad half a window, some are dilated or of groups."""
    rank = draw(st.sampled_from([1, 2, 2, 2]))

    def each(elements):
        one = draw(st.sampled_from(elements))
        return (
            (one,) * rank
            if draw(st.integers(0, 4))
            else draw(st.tuples(*[st.sampled_from(elements)] * rank))
        )

    kernel = each([1, 1, 2, 3, 3, 3, 3, 4, 5, 7, 9, 11, 15])
    dilation = each([1, 1, 1, 1, 1, 1, 2, 4])
    half = tuple((k - 1) * d // 2 for k, d in zip(kernel, dilation, strict=True))
    padding = draw(st.sampled_from([half, half, (0,) * rank, (1,) * rank]))
    stride = each([1, 1, 1, 2, 2, 3, 4, kernel[0]])
    space = (
        draw(st.tuples(*[st.sampled_from(EXTENTS)] * rank))
        if rank > 1
        else (draw(st.integers(1, 2003)),)
    )
    inner, outer = draw(st.sampled_from(CHANNELS)), draw(st.sampled_from(CHANNELS))
    groups = draw(st.sampled_from([1, 1, 1, inner, 2, 4, 8]))
    groups = groups if inner % groups == 0 == outer % groups else 1
    geometry = inner, outer, groups, space, kernel, stride, padding, dilation
    batch = draw(st.sampled_from([1, 2, 3, 4, 8]))
    assume(batch * max(inner, outer) * math.prod(space) < 6e6)
    assume(batch * inner * outer / groups * math.prod(space) * math.prod(kernel) < 4e9)
    return batch, *geometry


@given(geometry=full_sizes(), threads=st.sampled_from([1, 2, 3, 5, 8]), data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_geometry_of_full_size_stays_inside_its_workspace(geometry, threads, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16][: 1 + HAS_VECTORS]))
    with on_threads(threads):
        check_inside(*geometry, dtype)


@WITHOUT_TILES
@pytest.mark.parametrize(
    "geometry",
    [
        *WRONG_IN_ONEDNN,
        (8, 24, 5, 1, (14, 32), (2, 2), (1, 1), (1, 2), (2, 2)),
        (1, 56, 16, 1, (26, 34), (3, 1), (1, 1), (3, 0), (3, 1)),
        (4, 256, 32, 1, (2, 8), (11, 11), (1, 1), (5, 5), (1, 1)),
        (16, 16, 32, 4, (2, 33), (1, 3), (1, 1), (0, 0), (2, 1)),
        (3, 4, 2, 2, (52, 39), (3, 5), (1, 1), (0, 0), (2, 2)),
        # Right, but oneDNN takes more than is planned.
        (9, 8, 16, 8, (31, 31), (1, 1), (1, 1), (0, 0), (1, 1)),
        (9, 8, 256, 8, (13, 32), (12, 2), (1, 2), (0, 1), (1, 1)),
        (9, 16, 16, 4, (31, 33, 16), (1, 3, 1), (2, 1, 1), (0, 0, 0), (1, 1, 1)),
    ],
)
def test_the_same_of_bfloat16_without_tiles(geometry):
    check_inside(*geometry, torch.bfloat16)


@pytest.mark.parametrize(
    "geometry",
    [
        (9, 1, 1, 1, (27, 31), (12, 1), (1, 3), (0, 0), (1, 1)),
        (9, 1, 16, 1, (24, 38), (24, 8), (2, 1), (12, 0), (1, 1)),
        (3, 1, 1, 1, (7, 33), (7, 3), (2, 2), (3, 0), (1, 1)),
        (9, 1, 16, 1, (79, 47), (32, 1), (1, 2), (16, 0), (1, 1)),
        (9, 1, 1, 1, (41, 35), (11, 5), (1, 3), (0, 0), (1, 1)),
        (1, 1, 1, 1, (20, 51), (5, 3), (1, 3), (2, 1), (1, 1)),
    ],
)
def test_tall_windows_of_one_channel_stay_inside_their_workspace(geometry):
    check_inside(*geometry, torch.float32)


@pytest.mark.skipif(
    "amx_bf16" not in native.processor_flags(), reason="no matrix tiles of bfloat16 here"
)
@pytest.mark.parametrize(
    ("geometry", "most"),
    [
        ((4, 3, 768, 1, (256, 256), (16, 16), (16, 16), (0, 0), (1, 1)), (12, 20, 13)),
        ((1, 3, 96, 1, (224, 224), (4, 4), (4, 4), (0, 0), (1, 1)), (7, 3, 7)),
        ((2, 512, 512, 1, (3200,), (3,), (2,), (0,), (1,)), (12, 32, 34)),
        ((2, 1, 256, 1, (8000,), (10,), (5,), (0,), (1,)), (8, 7, 5)),
        ((2, 64, 64, 1, (48, 48), (3, 3), (1, 1), (12, 12), (12, 12)), (6, 6, 4)),
        ((4, 96, 96, 96, (28, 28), (7, 7), (1, 1), (3, 3), (1, 1)), (1, 1, 2)),
    ],
)
def test_windows_of_bfloat16_take_little(geometry, most):
    """MiB on two threads; far strides and dilation once had 1,200, of which 12 were taken."""
    with on_threads(2):
        sizes = check_inside(*geometry, torch.bfloat16)
    for size, limit in zip(sizes, most, strict=True):
        assert size <= limit << 20


@pytest.mark.skipif("avx512bw" not in native.processor_flags(), reason="no AVX-512 here")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "geometry",
    [
        (1, 32, 3, 1, (208, 188), (9, 9), (1, 1), (0, 0), (1, 1)),  # of style transfer
        (2, 64, 3, 1, (96, 96), (9, 9), (1, 1), (4, 4), (1, 1)),  # of super resolution
        (1, 64, 64, 1, (40, 50), (11, 11), (1, 1), (5, 5), (1, 1)),
        (2, 32, 32, 1, (4000,), (11,), (1,), (5,), (1,)),
        (3, 24, 48, 2, (33, 64), (10, 2), (1, 1), (1, 1), (1, 1)),
    ],
)
def test_wide_windows_take_little(geometry, threads):
    """Were counted as products with windows: 392 MiB of the first, of which 0.3 were taken."""
    with on_threads(threads):
        sizes = check_inside(*geometry, torch.float32)
    assert max(sizes) <= (12 + 4 * threads) << 20


def test_an_overflow_is_counted():
    x, weight, out = torch.randn(2, 8, 8, 16), torch.randn(16, 16, 3, 3), torch.empty(2, 8, 8, 16)
    tensors = [tvm_ffi.from_dlpack(t) for t in (x, weight)]
    call = tvm_ffi.get_global_func("relax_disc.cpu.call_with_workspace")
    kernel = tvm_ffi.get_global_func("relax_disc.cpu.convolution")
    with pytest.raises(RuntimeError, match="bytes of workspace, planned were 64"):
        call(64, kernel, *tensors, 1, 1, 1, 1, 1, 1, 1, tvm_ffi.from_dlpack(out))
