"""The softmax whose least weights are 0: what it computes, and where it is taken."""

import copy
import math

import pytest
import torch
import tvm
from torch import nn
from tvm import relax, tirx

import relax_disc
from relax_disc.ops.softmax import softmax
from relax_disc.pipeline import pipeline
from relax_disc.tir_kernels.target import cpu_target, cuda_target
from relax_disc.transform.libraries.dispatch_library import DispatchLibrary

LEAST = 2.0**-100


def module(build, dtype="float32", width=16):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([tirx.Var("n", "int64"), width], dtype))
    w = relax.Var("w", relax.TensorType([width, 4], dtype))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, x, w))
        builder.emit_func_output(result)
    return builder.get()


def operators(mod):
    return [b.value.op.name for block in mod["main"].body.blocks for b in block.bindings]


@pytest.mark.parametrize("axis", [0, 1])
def test_weights_are_pytorchs_and_the_least_are_0(axis):
    mod = module(lambda emit, x, w: emit(softmax(x, axis=axis)), width=37)
    machine = relax.VirtualMachine(relax.build(mod, "llvm", relax_pipeline=pipeline()), tvm.cpu())
    for rows in (1, 2, 19, 64):
        x = torch.randn(rows, 37, generator=torch.Generator().manual_seed(rows)) * 60
        if rows > 2:
            x[0], x[1, 3], x[2, :5] = -math.inf, math.nan, -math.inf
        wanted = torch.softmax(x.double(), axis)
        found = machine["main"](
            tvm.runtime.from_dlpack(x), tvm.runtime.from_dlpack(torch.ones(37, 4))
        )
        found = torch.from_dlpack(found)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-30, equal_nan=True)
        below = wanted / wanted.amax(axis, keepdim=True) < LEAST * 0.9
        assert not found[below].any()
        assert (found[found > 0] > 1e-33).all()


def through(emit, p, w):
    return emit(relax.op.matmul(p, w))


USES = {
    "products": (through, True),
    "scaled": (lambda e, p, w: through(e, e(relax.op.multiply(p, relax.const(2.0))), w), True),
    "over its sum": (
        lambda e, p, w: through(e, e(relax.op.divide(p, e(relax.op.sum(p, 1, keepdims=True)))), w),
        True,
    ),
    "returned": (lambda e, p, w: e(relax.op.permute_dims(p)), False),
    "a logarithm": (lambda e, p, w: through(e, e(relax.op.log(p)), w), False),
    "a logarithm of a sum": (
        lambda e, p, w: e(relax.op.log(through(e, e(relax.op.multiply(p, p)), w))),
        False,
    ),
    "compared": (
        lambda e, p, w: through(
            e, e(relax.op.astype(e(relax.op.greater(p, relax.const(0.0))), "float32")), w
        ),
        False,
    ),
    "a power": (
        lambda e, p, w: through(e, e(relax.op.power(p, relax.const(-0.5))), w),
        False,
    ),
    "a divisor": (
        lambda e, p, w: through(e, e(relax.op.divide(relax.const(1.0), p)), w),
        False,
    ),
    "a logarithm in a kernel": (
        lambda e, p, w: e(
            relax.BlockBuilder.current().call_te(
                lambda a: tvm.te.compute(a.shape, lambda *i: tirx.log(a(*i))), through(e, p, w)
            )
        ),
        False,
    ),
}


@pytest.mark.parametrize("use", USES)
def test_it_is_taken_where_nothing_tells_little_from_nothing(use):
    build, is_taken = USES[use]
    mod = module(lambda emit, x, w: build(emit, emit(relax.op.nn.softmax(x, -1)), w))
    found = operators(DispatchLibrary(cpu_target())(mod))
    assert ("relax_disc.softmax" in found) is is_taken
    assert ("relax.nn.softmax" in found) is not is_taken


def test_it_is_of_float32_on_a_cpu():
    def build(emit, x, w):
        return through(emit, emit(relax.op.nn.softmax(x, -1)), w)

    assert "relax.nn.softmax" in operators(DispatchLibrary(cpu_target())(module(build, "float64")))
    on_device = DispatchLibrary(cuda_target("sm_90"))(module(build))
    assert "relax.nn.softmax" in operators(on_device)


class Mixture(nn.Module):
    """The logarithm of a mixture of softmaxes, whose words may be all but impossible."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.9]))

    def forward(self, x, labels):
        weights = torch.softmax(self.scale, 0)
        words = torch.softmax(x[:, None] * self.scale[:, None], -1)
        mixed = (weights[:, None] * words).sum(1)
        return -mixed.gather(1, labels[:, None]).log().mean()


def test_a_loss_that_takes_logarithms_of_weights_is_pytorchs():
    model = Mixture()
    x, labels = torch.zeros(3, 20), torch.tensor([1, 2, 3])
    x[:, 0] = 98.0  # beyond the least normal number, before 0
    rows = torch.export.Dim("rows", min=1, max=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = relax_disc.compile(model, optimizer, (x, labels), dynamic_shapes=({0: rows}, {0: rows}))
    twin = copy.deepcopy(model)
    wanted = twin(x, labels)
    wanted.backward()
    assert torch.isfinite(wanted)
    torch.testing.assert_close(step(x, labels), wanted.detach(), rtol=1e-3, atol=0)
