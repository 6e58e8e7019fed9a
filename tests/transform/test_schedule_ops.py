"""Bindings in a better order: golden IR, the same values, a lower peak, edges kept."""

import hypothesis.strategies as st
import numpy as np
import torch
import tvm
from hypothesis import given, settings
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_disc.analysis import Kernel, SymbolicDim, SymbolicExpr, TensorGraph
from relax_disc.analysis.memory.peak import peak_bytes
from relax_disc.analysis.program.extraction import extract
from relax_disc.analysis.program.workspace import LibraryWorkspace
from relax_disc.analysis.schedule.order import points_and_checks, schedule_ops
from relax_disc.analysis.schedule.problem import problem_of
from relax_disc.transform.memory.schedule_ops import ScheduleOps, _best_order, _searched
from tests.relax_programs import Program, call, compile_program, draw_program


@I.ir_module
class TwoBranches:
    @R.function
    def main(x: R.Tensor(("n",), "float32")) -> R.Tensor((), "float32"):
        n = T.int64()
        with R.dataflow():
            row = R.reshape(x, R.shape([1, n]))
            column = R.reshape(x, R.shape([n, 1]))
            outer = R.multiply(row, column)
            inner = R.add(row, column)
            first = R.sum(outer)
            second = R.sum(inner)
            total = R.add(first, second)
            R.output(total)
        return total


@I.ir_module
class OneAfterTheOther:
    @R.function
    def main(x: R.Tensor(("n",), "float32")) -> R.Tensor((), "float32"):
        n = T.int64()
        with R.dataflow():
            row = R.reshape(x, R.shape([1, n]))
            column = R.reshape(x, R.shape([n, 1]))
            outer = R.multiply(row, column)
            first = R.sum(outer)
            inner = R.add(row, column)
            second = R.sum(inner)
            total = R.add(first, second)
            R.output(total)
        return total


def test_golden():
    before = TwoBranches.script()
    after = tvm.transform.Sequential([ScheduleOps()])(TwoBranches)
    tvm.ir.assert_structural_equal(after, OneAfterTheOther)
    assert TwoBranches.script() == before  # the input is not changed
    tvm.ir.assert_structural_equal(ScheduleOps()(after), OneAfterTheOther)
    tvm.ir.assert_structural_equal(ScheduleOps({"n": 7})(TwoBranches), OneAfterTheOther)


def run(mod, *arrays):
    machine = relax.VirtualMachine(relax.build(mod, "llvm"), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
    return [x.numpy() for x in result] if not hasattr(result, "numpy") else [result.numpy()]


def test_builds_with_the_stock_pipeline():
    x = np.arange(5, dtype="float32")
    np.testing.assert_array_equal(run(ScheduleOps()(TwoBranches), x), run(TwoBranches, x))


def test_impure_bindings_stay_where_they_are():
    @I.ir_module
    class Prints:
        @R.function(pure=False)
        def main(x: R.Tensor(("n", "n"), "float32")):
            a = R.exp(x)
            b = R.sin(x)
            c = R.sum(a)
            _ = R.print(c, format="{}")
            d = R.sum(b)
            e = R.add(c, d)
            return e

    scheduled = ScheduleOps()(Prints)
    names = [binding.var.name for binding in scheduled["main"].body.blocks[0].bindings]
    assert (
        names.index("_") == 3 and names[4:] == ["d", "e"] and sorted(names[:3]) == ["a", "b", "c"]
    )
    relax.analysis.well_formed(scheduled)


def test_leaves_functions_alone_whose_shapes_are_not_known():
    @I.ir_module
    class Unique:
        @R.function
        def main(x: R.Tensor(("n",), "int64")):
            with R.dataflow():
                a = R.unique(x)
                b = R.add(x, x)
                R.output(a, b)
            return (a, b)

    tvm.ir.assert_structural_equal(ScheduleOps()(Unique), Unique)


def test_updates_move_to_their_gradients():
    """High-level IR with in-place pairs: updates run early, but behind the readers."""
    layers = 6
    builder = relax.BlockBuilder()
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType([n, 64], "float32"))
    weights = [relax.Var(f"w{k}", relax.TensorType([64, 64], "float32")) for k in range(layers)]
    pairs = [[k + 1, k + 1] for k in range(layers)]
    with builder.function("main", [x, *weights], attrs={"relax_disc.inplace_pairs": pairs}):
        with builder.dataflow():
            value, saved = x, []
            for weight in weights:
                saved.append(value)
                value = builder.emit(relax.op.nn.relu(relax.op.matmul(value, weight)))
            gradient, gradients = value, []
            for weight, kept in zip(weights[::-1], saved[::-1], strict=True):
                transposed = builder.emit(relax.op.permute_dims(kept))
                gradients.append(builder.emit(relax.op.matmul(transposed, gradient)))
                other = builder.emit(relax.op.permute_dims(weight))
                gradient = builder.emit(relax.op.matmul(gradient, other))
            new = [
                builder.emit(relax.op.subtract(weight, grad), f"new_{weight.name}")
                for weight, grad in zip(weights, gradients[::-1], strict=True)
            ]
            results = builder.emit_output(relax.Tuple([builder.emit(relax.op.sum(value)), *new]))
        builder.emit_func_output(results)
    mod = builder.finalize()
    scheduled = ScheduleOps({"n": 4})(mod)
    relax.analysis.well_formed(scheduled)
    bindings = scheduled["main"].body.blocks[0].bindings
    names = [binding.var.name for binding in bindings]
    first, last = names.index(f"new_w{layers - 1}"), names.index("new_w0")
    assert first < last - 2 * layers  # not piled up at the end
    for k, weight in enumerate(weights):
        update = names.index(f"new_w{k}")
        for binding in bindings[update + 1 :]:
            assert weight not in relax.analysis.free_vars(binding.value)
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal((4, 64)).astype("float32")]
    arrays += [0.1 * generator.standard_normal((64, 64)).astype("float32") for _ in weights]
    for ours, theirs in zip(run(scheduled, *arrays), run(mod, *arrays), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_copies_over_parameters_run_early():
    """A new value that is copied over its weight leaves the arena before other kernels run."""
    steps = [("scale", [0], 0.5), ("constant", [], 0.5), ("scale", [0], 0.5), ("add", [1, 1], 0)]
    before = Program(1, 1, steps, [0, 5], [[1, 1]]).module()
    after = ScheduleOps()(before)
    for n in (1, 5, 4096):
        peaks = [peak_bytes(extract(mod, "main").graph().at({"n": n})) for mod in (before, after)]
        assert peaks[1] <= peaks[0]


def test_copies_that_need_each_other_do_not_move_early():
    """Two weights take each other's values: no copy may come before what reads the old ones."""
    program = Program(1, 2, [("total", [0], 0)], [3, 2, 2, 1], [[2, 1], [3, 2]])
    before = program.module()
    after = ScheduleOps()(before)
    relax.analysis.well_formed(after)
    for n in (1, 5, 4096):
        peaks = [peak_bytes(extract(mod, "main").graph().at({"n": n})) for mod in (before, after)]
        assert peaks[1] <= peaks[0]


def test_an_order_found_without_workspaces_stays_unless_it_needs_more():
    """`narrow` first is as good without workspaces; what `wide` works in asks for `wide` first."""
    dim = SymbolicDim("n", 1, 512)
    n = SymbolicExpr.dim(dim)
    for bytes_, expected in ((64 * n, (1, 0, 2)), (SymbolicExpr(0), (0, 1, 2))):
        room = LibraryWorkspace("aten", (SymbolicExpr(1), bytes_))
        kernels = (
            Kernel("narrow", (0,), (1,)),
            Kernel("wide", (0,), (2,), workspace_bytes=room),
            Kernel("join", (1, 2), (3,)),
        )
        graph = TensorGraph((dim,), (64, 40 * n, 8 * n, 4), (0,), (3,), kernels)
        _, without = _searched(graph)
        assert schedule_ops(without).order == (0, 1, 2)
        points, checked = points_and_checks(graph, None)
        problem = problem_of(graph, checked)
        assert _best_order(graph, problem, points, checked, "main") == expected


@settings(max_examples=max(60, settings().max_examples // 4))
@given(st.data())
def test_random_programs_are_no_worse_and_compute_the_same(data):
    """Programs of kernels with aliases, several results and values that replace parameters."""
    program = draw_program(data, st, most=20)
    before = program.module()
    after = ScheduleOps()(before)
    relax.analysis.well_formed(after)
    names = [
        sorted(b.var.name for block in mod["main"].body.blocks for b in block.bindings)
        for mod in (before, after)
    ]
    assert names[0] == names[1]
    for n in (1, 5, 4096):
        peaks = [peak_bytes(extract(mod, "main").graph().at({"n": n})) for mod in (before, after)]
        assert peaks[1] <= peaks[0]
    machine, replaced = compile_program(after), dict(program.pairs)
    tensors = program.arguments(3)
    expected = program.expected(tensors)
    outputs = call(machine, tensors)
    kept = [value for position, value in enumerate(expected) if position not in replaced]
    for output, value in zip(outputs, kept, strict=True):
        torch.testing.assert_close(output, value, rtol=0, atol=0)
    for position, weight in replaced.items():
        torch.testing.assert_close(tensors[weight], expected[position], rtol=0, atol=0)
