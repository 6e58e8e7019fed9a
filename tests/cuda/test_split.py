"""Long reductions of few rows or columns run in many blocks, in an order that their sizes fix."""

from __future__ import annotations

import shutil

import pytest
import torch
import tvm
from tvm import relax, te, tirx

from relax_disc.tir_kernels import rules_for
from relax_disc.tir_kernels.target import cuda_target
from relax_disc.transform.schedule_kernels import schedule_kernel
from tests.cuda.emulator import Emulator, announced
from tests.tir_kernels.kernel_runs import fused_kernel, tensor

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

op = relax.op
N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


def kernel_of(params, build):
    return lambda: fused_kernel(params, build)


def norms_of_columns(columns):
    """Sums down columns and what is computed of them, which chains of reductions make."""
    count = tirx.IntImm("int64", columns)
    x = te.placeholder((N, count), "float32", "x")
    row = te.reduce_axis((0, N))
    total = te.compute((count,), lambda c: te.sum(x[row, c] * x[row, c], row), "total")
    norm = te.compute((count,), lambda c: te.sqrt(total[c] * 0.5), "norm")
    return te.create_prim_func([x, norm])


# kernel, reference, shapes and how many blocks they are: more than the first's in two launches
KERNELS = {
    "columns": (
        kernel_of([tensor("x", [N, 24])], lambda emit, x: op.sum(x, [0])),
        lambda x: x.sum(0),
        [((1, 24), 3), ((8192, 24), 3), ((8193, 24), 3 * 32)],
    ),
    "columns, and what is computed of them": (
        lambda: norms_of_columns(6),
        lambda x: x.square().sum(0).mul(0.5).sqrt(),
        [((1, 6), 1), ((9000, 6), 64)],
    ),
    "columns of 16 bytes, and what is computed of them": (
        lambda: norms_of_columns(12),
        lambda x: x.square().sum(0).mul(0.5).sqrt(),
        [((1, 12), 1), ((9000, 12), 64)],
    ),
    "everything": (
        kernel_of([tensor("x", [N, M])], lambda emit, x: op.sum(x)),
        lambda x: x.sum(),
        [((1, 1), 1), ((128, 128), 1), ((128, 129), 256), ((3, 40001), 256)],
    ),
    "few rows": (
        kernel_of([tensor("x", [5, N])], lambda emit, x: op.max(x, [1])),
        lambda x: x.max(1).values,
        [((5, 7), 5), ((5, 20000), 5 * 64)],
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_long_reduction_is_split_over_blocks(name):
    make, reference, cases = KERNELS[name]
    target = cuda_target("sm_90")
    emulator = Emulator.load()
    emulator.take_findings()
    kernel = schedule_kernel(make(), target, rules_for(target))
    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    with emulator.compiling():
        program = tvm.compile(announced(module), target)
    torch.manual_seed(0)
    for shape, blocks in cases:
        x = torch.randn(shape)
        wanted = reference(x.double())
        results = []
        for _ in range(2):
            emulator.seed += 1
            emulator.forget()
            found = torch.full(wanted.shape, float("nan"))
            program["main"](emulator.tensor(x), emulator.tensor(found))
            results.append(found)
        torch.testing.assert_close(results[0].double(), wanted, rtol=2e-6, atol=2e-4)
        assert torch.equal(*results)
        (call,) = emulator.calls
        assert call.launches[0][1][0] == blocks, shape
        assert len(call.launches) == (2 if blocks > cases[0][1] else 1)
    findings = emulator.take_findings()
    assert not findings, "\n".join(map(str, findings))
