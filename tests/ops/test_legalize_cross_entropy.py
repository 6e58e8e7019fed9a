"""Cross-entropy and its gradient as kernels, against PyTorch in float64."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from tvm import relax, tirx
from tvm.relax.backend.cpu_generic import pipeline as stock

from relax_disc import ops
from relax_disc.analysis.kernels.inplace import inplace_pairs
from relax_disc.tir_kernels import cpu_target
from relax_disc.transform.schedule_kernels import ScheduleKernels
from tests.tiers import every

CLASSES = 37
TARGET = cpu_target()
CASES = list(itertools.product((False, True), (0.0, 0.1), ("mean", "sum", "none")))


def program(dtype, weighted, smoothing, reduction):
    """Loss, statistics and the gradient of the logits as one function."""
    n = tirx.Var("n", "int64")
    options = {"ignore_index": -100, "label_smoothing": smoothing, "reduction": reduction}
    logits = relax.Var("logits", relax.TensorType([n, CLASSES], dtype))
    target = relax.Var("target", relax.TensorType([n], "int64"))
    grad = relax.Var("grad", relax.TensorType([n] if reduction == "none" else [], dtype))
    weight = relax.Var("weight", relax.TensorType([CLASSES], dtype))
    builder = relax.BlockBuilder()
    weights = [weight] if weighted else []
    with builder.function("main", [logits, target, grad, *weights]):
        with builder.dataflow():
            result = builder.emit(ops.cross_entropy(logits, target, *weights, **options))
            loss, lse, count = (builder.emit(relax.TupleGetItem(result, i)) for i in range(3))
            gradient = builder.emit(
                ops.cross_entropy_backward(grad, logits, target, lse, count, *weights, **options)
            )
            out = builder.emit_output(relax.Tuple([loss, gradient]))
        builder.emit_func_output(out)
    return builder.get()


def kernels(mod):
    with TARGET:
        mod = tvm.transform.Sequential(stock.legalize_passes(TARGET))(mod)
        return ScheduleKernels()(mod)


def build(mod):
    lower = stock.dataflow_lower_passes(TARGET) + stock.finalize_passes(TARGET)
    with TARGET:
        mod = tvm.transform.Sequential(lower)(kernels(mod))
    made = relax.build(mod, TARGET, relax_pipeline=tvm.transform.Sequential([]))
    return relax.VirtualMachine(made, tvm.cpu())["main"]


@pytest.mark.parametrize(
    ("weighted", "smoothing", "reduction"), every(2, [pytest.param(*case) for case in CASES])
)
def test_against_pytorch(weighted, smoothing, reduction):
    function = build(program("float32", weighted, smoothing, reduction))
    generator = torch.Generator().manual_seed(0)
    for n in (1, 7, 33):
        logits = 3 * torch.randn(n, CLASSES, generator=generator)
        target = torch.randint(0, CLASSES, (n,), generator=generator)
        target[n // 2 :: 2] = -100 if n > 1 else 5
        weight = torch.rand(CLASSES, generator=generator) if weighted else None
        exact = logits.double().requires_grad_()
        loss = torch.nn.functional.cross_entropy(
            exact,
            target,
            None if weight is None else weight.double(),
            label_smoothing=smoothing,
            reduction=reduction,
        )
        grad = torch.randn(loss.shape, generator=generator)
        (expected,) = torch.autograd.grad(loss, exact, grad.double())
        arrays = [logits, target, grad] + ([] if weight is None else [weight])
        got, gradient = function(*(tvm.runtime.tensor(array.numpy()) for array in arrays))
        np.testing.assert_allclose(got.numpy(), loss.detach().numpy(), rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(gradient.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def test_bfloat16_is_computed_in_float32():
    function = build(program("bfloat16", False, 0.0, "mean"))
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, CLASSES, generator=generator)).bfloat16()
    target = torch.randint(0, CLASSES, (9,), generator=generator)
    exact = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact, target)
    (expected,) = torch.autograd.grad(loss, exact)
    arrays = [
        logits.float().numpy().astype(ml_dtypes.bfloat16),
        target.numpy(),
        np.ones((), ml_dtypes.bfloat16),
    ]
    got, gradient = function(*(tvm.runtime.tensor(array) for array in arrays))
    # One rounding to eight bits, of the result.
    np.testing.assert_allclose(float(got.numpy()), loss.item(), rtol=2**-8)
    gradient = gradient.numpy().astype("float64")
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=2**-8, atol=1e-7)


def test_gradient_may_overwrite_the_logits():
    mod = kernels(program("float32", False, 0.1, "mean"))
    (func,) = (func for var, func in mod.functions.items() if "gradient" in var.name_hint)
    names = [param.name for param in func.params]
    assert (names.index("logits"), len(names) - 1) in inplace_pairs(func)
