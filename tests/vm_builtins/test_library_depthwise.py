"""The gradient of a depthwise convolution by its weight: against float64, NaN, threads."""

import math

import pytest
import torch
import tvm_ffi

from relax_disc.vm_builtins.libraries.install import install
from tests.thread_count import threads

install("cpu")


def gradient(grad, x, kernel, stride, padding, dilation):
    """By the library; both activations with their channels last."""
    out = torch.full((x.shape[-1], 1, *kernel), math.nan)
    function = tvm_ffi.get_global_func("relax_disc.cpu.depthwise_weight")
    given = [tvm_ffi.from_dlpack(t) for t in (grad, x)]
    function(*given, *stride, *padding, *dilation, x.shape[-1], tvm_ffi.from_dlpack(out))
    return out


def example(channels, space, kernel, stride, padding, dilation):
    x = torch.randn(3, channels, *space, dtype=torch.float64)
    weight = torch.randn(channels, 1, *kernel, dtype=torch.float64, requires_grad=True)
    convolve = torch.nn.functional.conv2d if len(space) == 2 else torch.nn.functional.conv1d
    y = convolve(x, weight, None, stride, padding, dilation, channels)
    grad = torch.randn_like(y)
    y.backward(grad)
    last = [t.movedim(1, -1).float().contiguous() for t in (grad, x)]
    return *last, weight.grad


@pytest.mark.parametrize(
    ("channels", "space", "kernel", "stride", "padding", "dilation"),
    [
        (96, (13, 10), (5, 5), (1, 1), (2, 2), (1, 1)),
        (72, (14, 9), (3, 5), (2, 1), (1, 2), (1, 1)),
        (7, (9, 30), (7, 7), (2, 3), (6, 0), (1, 2)),
        (200, (3, 4), (7, 7), (1, 1), (3, 3), (1, 1)),
        (16, (1, 1), (5, 5), (1, 1), (2, 2), (1, 1)),
        (40, (1000,), (31,), (2,), (15,), (1,)),
    ],
)
def test_gradient_is_that_of_float64(channels, space, kernel, stride, padding, dilation):
    geometry = (kernel, stride, padding, dilation)
    grad, x, exact = example(channels, space, *geometry)
    with threads(1):
        found = gradient(grad, x, *geometry)
    assert float((found.double() - exact).norm() / exact.norm()) < 1e-6
    for count in (2, 5):
        with threads(count):
            assert torch.equal(gradient(grad, x, *geometry), found)
    x[1].view(-1)[channels * (x[1].numel() // channels // 2) + 3] = math.nan
    strange = gradient(grad, x, *geometry).isnan()
    assert strange[3].any() and not strange[:3].any() and not strange[4:].any()
