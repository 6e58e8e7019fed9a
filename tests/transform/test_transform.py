"""The package's face: every pass is there by its name and composes with TVM's."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_disc


@I.ir_module
class Softmax:
    @R.function
    def main(x: R.Tensor(("n", "m"), "float32")) -> R.Tensor(("n", "m"), "float32"):
        with R.dataflow():
            power = R.exp(x)
            total = R.sum(power, axis=1, keepdims=True)
            share = R.divide(power, total)
            R.output(share)
        return share


@pytest.mark.parametrize("name", relax_disc.transform.__all__)
def test_every_pass_is_alone_in_a_sequence(name):
    factory = getattr(relax_disc.transform, name)
    target = tvm.target.Target("llvm")
    needs_target = name in ("DispatchLibrary", "ScheduleKernels")
    chosen = factory(target) if needs_target else factory()
    prepare = []
    if name not in ("Simplify", "ScheduleOps", "DispatchLibrary", "ChunkVocabularyHead"):
        prepare = [relax.transform.LegalizeOps(), relax.transform.RewriteDataflowReshape()]
    with target:
        module = tvm.transform.Sequential([*prepare, chosen])(Softmax)
    assert isinstance(module["main"], relax.Function)
    if name == "PlanArena":
        return  # its own tests build and run it
    values = np.random.default_rng(0).normal(size=(3, 5)).astype("float32")
    machine = relax.VirtualMachine(relax.build(module, target), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(values)).numpy()
    np.testing.assert_allclose(found, np.exp(values) / np.exp(values).sum(1, keepdims=True), 1e-6)
