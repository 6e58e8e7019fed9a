"""Log-sum-exp of rows and its gradient as kernels, against PyTorch in float64."""

import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.backend.cpu_generic import pipeline as stock

from relax_disc import ops
from relax_disc.tir_kernels import cpu_target
from relax_disc.transform.schedule_kernels import ScheduleKernels

COLUMNS = 37
TARGET = cpu_target()


@pytest.fixture(scope="module", params=["float32", "float64", "bfloat16"])
def function(request):
    """The log-sum-exp and the gradient of x, for any number of rows, and its types."""
    n = tirx.Var("n", "int64")
    wide = "float64" if request.param == "float64" else "float32"
    x = relax.Var("x", relax.TensorType([n, COLUMNS], request.param))
    grad = relax.Var("grad", relax.TensorType([n], wide))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, grad]):
        with builder.dataflow():
            lse = builder.emit(ops.logsumexp(x))
            gradient = builder.emit(ops.logsumexp_backward(grad, x, lse))
            out = builder.emit_output(relax.Tuple([lse, gradient]))
        builder.emit_func_output(out)
    with TARGET:
        passes = [*stock.legalize_passes(TARGET), ScheduleKernels()]
        passes += stock.dataflow_lower_passes(TARGET) + stock.finalize_passes(TARGET)
        module = tvm.transform.Sequential(passes)(builder.get())
    made = relax.build(module, TARGET, relax_pipeline=tvm.transform.Sequential([]))
    main = relax.VirtualMachine(made, tvm.cpu())["main"]

    def call(*tensors):
        return [torch.from_dlpack(t) for t in main(*map(tvm_ffi.from_dlpack, tensors))]

    return call, getattr(torch, request.param), getattr(torch, wide)


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_against_pytorch(function, rows):
    call, dtype, wide = function
    generator = torch.Generator().manual_seed(rows)
    x = (30 * torch.randn(rows, COLUMNS, generator=generator)).to(dtype)
    grad = torch.randn(rows, generator=generator).to(wide)
    exact = x.double().requires_grad_()
    lse = torch.logsumexp(exact, 1)
    (lse * grad.double()).sum().backward()
    found, gradient = call(x, grad)
    assert found.dtype == wide and gradient.dtype == dtype
    torch.testing.assert_close(found.double(), lse.detach(), rtol=1e-6, atol=1e-6)
    loose = 1e-2 if dtype is torch.bfloat16 else 2e-5  # lse is near 100: 1e-7 of it, in exponents
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=loose, atol=1e-7)


def test_infinite_rows_are_as_in_pytorch(function):
    call, dtype, wide = function
    x = torch.zeros(4, COLUMNS, dtype=dtype)
    x[0] = x[1, 1:] = float("-inf")
    x[2, 3] = float("inf")
    found, _ = call(x, torch.ones(4, dtype=wide))
    torch.testing.assert_close(found, torch.logsumexp(x.to(wide), 1))
