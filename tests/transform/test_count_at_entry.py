"""What is counted before a call: dims of masks that the batch alone makes."""

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_disc.transform.memory.count_at_entry import CountAtEntry


@I.ir_module
class Picked:
    """The labels pick k, and of these rows what is above 3 picks m; the weight picks p."""

    @R.function
    def main(
        dims: R.Shape(["k", "m", "p"]),
        labels: R.Tensor(("n",), "int64"),
        w: R.Tensor((48,), "float32"),
    ):
        R.func_attr(
            {
                "relax_disc.counted": {"k": 0, "m": 1, "p": 0},
                "relax_disc.param_kinds": ["shape", "batch", "parameter"],
                "relax_disc.inplace_pairs": [[1, 2]],
                "tir_var_upper_bound": {"n": 64},
            }
        )
        k, m, p = T.int64(), T.int64(), T.int64()
        with R.dataflow():
            mask = R.greater(labels, R.const(0, "int64"))
            rows = R.call_dps_packed("relax_disc.cpu.nonzero", (mask,), R.Tensor((k,), "int64"))
            large = R.greater(rows, R.const(3, "int64"))
            more = R.call_dps_packed("relax_disc.cpu.nonzero", (large,), R.Tensor((m,), "int64"))
            positive = R.greater(w, R.const(0.0, "float32"))
            of_w = R.call_dps_packed("relax_disc.cpu.nonzero", (positive,), R.Tensor((p,), "int64"))
            total = R.add(R.add(R.sum(rows), R.sum(more)), R.sum(of_w))
            new = R.multiply(w, R.const(2.0, "float32"))
            R.output(total, new)
        return total, new


@I.ir_module
class Expected:
    @R.function
    def main__counts(dims: R.Shape(["k", "m", "p"]), labels: R.Tensor(("n",), "int64")):
        R.func_attr(
            {
                "relax_disc.counted": {"k": 0, "m": 1},
                "relax_disc.param_kinds": ["shape", "batch"],
                "tir_var_upper_bound": {"n": 64},
            }
        )
        k, m = T.int64(), T.int64()
        with R.dataflow():
            mask = R.greater(labels, R.const(0, "int64"))
            rows = R.call_dps_packed("relax_disc.cpu.nonzero", (mask,), R.Tensor((k,), "int64"))
            large = R.greater(rows, R.const(3, "int64"))
            more = R.call_dps_packed("relax_disc.cpu.nonzero", (large,), R.Tensor((m,), "int64"))
            counts = (rows, more)
            R.output(counts)
        return counts


def test_masks_of_the_batch_are_counted_in_a_function_of_their_own():
    made = CountAtEntry()(Picked)
    tvm.ir.assert_structural_equal(made["main"], Picked["main"])
    tvm.ir.assert_structural_equal(made["main__counts"], Expected["main__counts"])
    assert relax.analysis.check_well_formed(made)


def test_a_dim_that_a_parameter_counts_too_is_left_with_all_that_is_made_of_it():
    dims = list(Picked["main"].params[0].ty.values)
    one = Picked["main"].bind_symbolic_vars({dims[2]: dims[0]})
    made = CountAtEntry()(tvm.IRModule({"main": one}))
    assert [variable.name_hint for variable in made.get_global_vars()] == ["main"]


def test_products_are_left_to_the_function():
    @R.function
    def main(dims: R.Shape(["k"]), x: R.Tensor(("n", "n"), "float32")):
        R.func_attr(
            {
                "relax_disc.counted": {"k": 0},
                "relax_disc.param_kinds": ["shape", "batch"],
            }
        )
        k, n = T.int64(), T.int64()
        with R.dataflow():
            flat = R.reshape(R.matmul(x, x), (n * n,))
            mask = R.greater(flat, R.const(0.0, "float32"))
            rows = R.call_dps_packed("relax_disc.cpu.nonzero", (mask,), R.Tensor((k,), "int64"))
            R.output(rows)
        return rows

    made = CountAtEntry()(tvm.IRModule({"main": main}))
    assert [variable.name_hint for variable in made.get_global_vars()] == ["main"]
