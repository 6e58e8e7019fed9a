"""Relax written by hand whose sizes only the data tell: counted, inside budgets, same bits."""

import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_disc.ops.aten import Recipe
from relax_disc.pipeline import pipeline
from relax_disc.vm_builtins.session import Session

ROWS, WIDTH = 64, 48


@I.ir_module
class Picked:
    """What is positive goes through layers, row by row, and is added up."""

    @R.function
    def main(
        sizes: R.Shape(["k"]),
        score: R.Tensor(("n",), "float32"),
        x: R.Tensor(("n", 48), "float32"),
        w: R.Tensor((48, 48), "float32"),
    ):
        R.func_attr({"relax_disc.counted": {"k": 0}, "relax.force_pure": True})
        k = T.int64()
        with R.dataflow():
            mask = R.greater(score, R.const(0.0, "float32"))
            places = R.call_dps_packed("relax_disc.cpu.nonzero", (mask,), R.Tensor((k,), "int64"))
            rows = R.take(x, places, axis=0)
            a = R.tanh(R.matmul(rows, w))
            b = R.tanh(R.matmul(a, w))
            c = R.tanh(R.matmul(b, w))
            d = R.add(R.multiply(c, b), R.multiply(a, rows))
            total = R.sum(R.matmul(d, w), axis=[0])
            R.output(places, total)
        return places, total


def bounded(count):
    """Arguments of a call: its size is entered with the bound."""
    generator = torch.Generator().manual_seed(count)
    score = -torch.ones(ROWS)
    score[torch.randperm(ROWS, generator=generator)[:count]] = 1.0
    x = torch.randn(ROWS, WIDTH, generator=generator)
    w = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    return tvm_ffi.Shape((ROWS,)), score, x, w


def expected(score, x, w):
    places = score.gt(0).nonzero().squeeze(1)
    rows = x[places]
    a = torch.tanh(rows @ w)
    b = torch.tanh(a @ w)
    c = torch.tanh(b @ w)
    return places, ((c * b + a * rows) @ w).sum(0)


@pytest.fixture(scope="module")
def machine():
    executable = relax.build(Picked, "llvm", relax_pipeline=pipeline())
    return relax.VirtualMachine(executable, tvm.cpu())


def results(machine, arguments):
    size, *tensors = arguments
    found = machine["main"](size, *(tvm.runtime.from_dlpack(each) for each in tensors))
    return [torch.from_dlpack(each).clone() for each in found]


@pytest.mark.parametrize("count", [ROWS, 17, 1, 0])
def test_what_is_picked_is_counted_and_equals_torch(machine, count):
    arguments = bounded(count)
    places, total = results(machine, arguments)
    wanted = expected(*arguments[1:])
    assert torch.equal(places, wanted[0])
    torch.testing.assert_close(total, wanted[1], rtol=1e-5, atol=1e-4)
    report, names = Session.of(machine).report(), Session.of(machine).metadata.dims
    assert dict(zip(names, report.dims, strict=True)) == {"k": count, "n": ROWS}
    assert report.peak_bytes <= report.planned_peak_bytes


def test_what_is_called_outside_of_programs_is_no_part_of_their_peaks(machine):
    """An operator that is lent no memory: PyTorch's allocator gives it some, which is counted."""
    recipe = Recipe("aten::logsumexp", "", None)
    recipe.arguments += [["operand", 0], ["list", [["int", 0]]], ["bool", False]]
    call = tvm_ffi.get_global_func("relax_disc.aten.call")
    take = tvm_ffi.get_global_func("relax_disc.cpu.take_overflow")
    x, out = tvm_ffi.from_dlpack(torch.ones(64, 7)), tvm_ffi.from_dlpack(torch.empty(7))
    results(machine, bounded(17))
    before = Session.of(machine).report()
    take()
    call(recipe.text([0]), 0, x, out)
    assert take() > 0  # else this test proves nothing
    call(recipe.text([0]), 0, x, out)
    results(machine, bounded(17))
    assert Session.of(machine).report().peak_bytes == before.peak_bytes


def test_budgets_hold_and_change_no_bit(machine):
    session = Session.of(machine)
    names = session.metadata.dims
    dims = [ROWS for _ in names]
    free, least = session.plan(dims), session.plan(dims, 0)
    assert least.least_bytes < free.peak_bytes
    wanted = {count: results(machine, bounded(count)) for count in range(ROWS + 1)}
    run_again = 0
    try:
        for budget in (least.least_bytes, (least.least_bytes + free.peak_bytes) // 2):
            session.memory_budget = budget
            for count, bits in wanted.items():
                found = results(machine, bounded(count))
                assert all(torch.equal(a, b) for a, b in zip(found, bits, strict=True))
                report = session.report()
                assert report.peak_bytes <= budget
                run_again += report.recomputations
    finally:
        session.memory_budget = None
    assert run_again > 0
