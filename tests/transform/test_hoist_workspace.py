"""Scratch memory of kernels becomes a tensor of the plan."""

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_disc.pipeline import PipelineOptions, pipeline
from relax_disc.transform.memory.hoist_workspace import HoistWorkspace
from relax_disc.vm_builtins.session import Session

TARGET = tvm.target.Target("llvm")


@I.ir_module
class Softmax:
    @R.function
    def main(x: R.Tensor(("n", 40), "float32")):
        with R.dataflow():
            once = R.nn.softmax(x, axis=-1)
            twice = R.nn.softmax(once, axis=-1)
            R.output(twice)
        return twice

    @R.function
    def other(x: R.Tensor(("m", 40), "float32")):
        with R.dataflow():
            halves = R.split(R.nn.softmax(x, axis=-1), 2, axis=1)
            out = (halves[1], halves[0])
            R.output(out)
        return out


def legalized(module):
    return tvm.transform.Sequential([relax.transform.LegalizeOps()])(module)


def test_results_that_nobody_reads():
    after = HoistWorkspace()(legalized(Softmax))
    relax.analysis.well_formed(after)
    for name in ("main", "other"):
        calls = [
            binding.value
            for block in after[name].body.blocks
            for binding in block.bindings
            if isinstance(binding.value, relax.Call)
        ]
        kinds = calls[0].ty_args[0]
        extents = [
            [getattr(extent, "name", None) or int(extent) for extent in kind.shape.values]
            for kind in kinds.fields
        ]
        size = "n" if name == "main" else "m"
        assert extents == [[size, 40], [size], [size, 40], [size]]
    kernel = after["softmax"]
    assert len(kernel.params) == 5
    assert not kernel.body.block.alloc_buffers


def test_small_constant_buffers_stay():
    @I.ir_module
    class Small:
        @R.function
        def main(x: R.Tensor((4, 40), "float32")):
            with R.dataflow():
                out = R.nn.softmax(x, axis=-1)
                R.output(out)
            return out

    before = legalized(Small)
    tvm.ir.assert_structural_equal(HoistWorkspace()(before), before)


def test_same_results_and_the_arena_holds_the_workspace():
    options = PipelineOptions(schedule_kernels=False)
    ours = relax.build(Softmax, TARGET, relax_pipeline=pipeline(options))
    stock = relax.build(Softmax, TARGET, relax_pipeline=relax.get_default_pipeline(TARGET))
    machine, reference = (relax.VirtualMachine(each, tvm.cpu()) for each in (ours, stock))
    x = np.random.default_rng(0).standard_normal((100, 40)).astype("float32")
    argument = tvm.runtime.tensor(x)
    np.testing.assert_allclose(
        machine["main"](argument).numpy(), reference["main"](argument).numpy(), rtol=1e-6
    )
    for mine, theirs in zip(machine["other"](argument), reference["other"](argument), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-6)
    report = Session.of(machine).report()
    # The first softmax with its workspace: 100 x 40 twice, and 100 twice, in 64-byte units.
    assert report.arena_bytes >= 2 * 16000 + 2 * 448
    assert report.peak_bytes == report.planned_peak_bytes
