"""Modules whose dims are written in one another by the shape graph, as the pipeline does."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_disc  # noqa: F401  registers the pipeline
from relax_disc.memory_analysis import analyze_memory, largest
from relax_disc.transform.simplify.unify_dims import UnifyDims


@I.ir_module
class Rows:
    @R.function
    def main(x: R.Tensor(("S0",), "float32"), y: R.Tensor(("S1", 8), "float32")) -> R.Tensor(
        ("S0",), "float32"
    ):
        S1 = T.int64()
        with R.dataflow():
            rows = R.reshape(x, (12, S1))
            total = R.sum(R.matmul(rows, y))
            out = R.multiply(x, total)
            R.output(out)
        return out


@I.ir_module
class InOneDim:
    @R.function
    def main(x: R.Tensor(("S1 * 12",), "float32"), y: R.Tensor(("S1", 8), "float32")) -> R.Tensor(
        ("S1 * 12",), "float32"
    ):
        S1 = T.int64()
        with R.dataflow():
            rows = R.reshape(x, (12, S1))
            total = R.sum(R.matmul(rows, y))
            out = R.multiply(x, total)
            R.output(out)
        return out


def test_golden():
    before = Rows.script()
    after = UnifyDims()(Rows)
    tvm.ir.assert_structural_equal(after, InOneDim)
    assert Rows.script() == before
    assert UnifyDims()(after).same_as(after)


def test_declared_dims_stay():
    declared = tvm.IRModule(
        {"main": Rows["main"].with_attr("relax_disc.dims", {"S0": [12, 120, 12], "S1": [1, 10, 1]})}
    )
    assert UnifyDims()(declared).same_as(declared)


def test_a_budget_asks_for_one_dim():
    ranged = tvm.IRModule({"main": Rows["main"].with_attr("tir_var_upper_bound", {"S1": 64})})
    peaks = [analyze_memory(ranged, {"S1": size}).peak_bytes for size in (20, 21)]
    assert largest(ranged, "S1", memory_budget=peaks[1] - 1) == 20
    assert peaks[0] < peaks[1]


def test_the_pipeline_plans_and_runs_in_one_dim():
    peak = analyze_memory(Rows, {"S1": 50})
    assert {dim.name for size in peak.symbolic_peak for dim in size.free_dims} == {"S1"}
    machine = relax.VirtualMachine(
        relax.build(Rows, "llvm", relax_pipeline="relax_disc"), tvm.cpu()
    )
    x, y = np.arange(36, dtype="float32"), np.ones((3, 8), "float32")
    out = machine["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y)).numpy()
    np.testing.assert_allclose(out, x * (x.reshape(12, 3) @ y).sum(), rtol=1e-5)
    with pytest.raises((ValueError, RuntimeError), match=r"S1 \* 12"):
        machine["main"](tvm.runtime.tensor(x[:35]), tvm.runtime.tensor(y))
