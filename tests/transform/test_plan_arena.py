"""Lowering to one arena: golden form, several functions, what is left to the stock passes."""

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_disc.transform.memory.plan_arena import PlanArena
from relax_disc.vm_builtins.plan_metadata import PlanMetadata, Storage
from tests.placement import run_program
from tests.relax_programs import Program


def lowered(module):
    return tvm.transform.Sequential([relax.transform.ToNonDataflow(), PlanArena()])(module)


def calls(function):
    """Names of the run-time functions that a lowered function calls, in order."""
    names = []
    for binding in function.body.blocks[0].bindings:
        op = getattr(binding.value, "op", None)
        if isinstance(op, relax.ExternFunc):
            names.append(op.global_symbol.removeprefix("relax_disc."))
    return names


def metadata_of(module, name="main"):
    call = module[f"{name}__session"].body.blocks[0].bindings[0].value
    return PlanMetadata.from_json(str(call.args[1].fields[0].value))


def test_golden_form():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((8, 8), "float32")):
            n = T.int64()
            y = R.call_dps_packed("test.matmul", (x, w), out_ty=R.Tensor((n, 8), "float32"))
            z = R.call_dps_packed("test.matmul", (y, w), out_ty=R.Tensor((n, 8), "float32"))
            return z

    after = lowered(Before)
    assert calls(after["main"]) == ["enter", "kernel", "kernel", "output", "leave"]
    assert [str(v) for v in after["main"].body.blocks[0].bindings[1].value.args[1].values] == ["n"]
    metadata = metadata_of(after)
    assert metadata.dims == ("n",)
    storage = [tensor.storage for tensor in metadata.tensors]
    assert storage == [Storage.GIVEN, Storage.GIVEN, Storage.ARENA, Storage.ESCAPING]
    sizes = [run_program(metadata.programs[tensor.bytes], [5]) for tensor in metadata.tensors]
    assert sizes == [160, 256, 160, 160]
    assert after["main"].ret_ty.shape.values[1] == 8


def test_function_in_two_halves():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor(("n", 8), "float32"),
            w: R.Tensor((8, 8), "float32"),
            dy: R.Tensor(("n", 8), "float32"),
        ):
            R.func_attr({"relax_disc.second_half": [1, 2]})
            n = T.int64()
            # What only the second half needs comes last in the first, whatever the program says.
            dw = R.call_dps_packed("test.matmul", (dy, w), out_ty=R.Tensor((n, 8), "float32"))
            y = R.call_dps_packed("test.matmul", (x, w), out_ty=R.Tensor((n, 8), "float32"))
            dx = R.call_dps_packed("test.add", (dw, y), out_ty=R.Tensor((n, 8), "float32"))
            return (y, dx, dw)

    after = lowered(Before)
    assert calls(after["main"]) == ["enter", "kernel", "pause", "output"]
    second = ["supply", "kernel", "kernel", "output", "output", "leave"]
    assert calls(after["main__backward"]) == second
    assert len(after["main"].params) == 2
    assert [param.name for param in after["main__backward"].params] == ["frame", "dy"]
    assert len(after["main"].ret_ty.fields) == 2  # and the frame
    kernels = metadata_of(after).kernels
    assert kernels[0].inputs == (0, 1) and kernels[1].inputs == (2, 1)


def test_overwritten_parameter_is_not_returned():
    program = Program(1, 1, [("scale", [1], 0.5), ("matmul", [0, 1], 0)], [3, 2], [[1, 1]])
    after = lowered(program.module())
    metadata = metadata_of(after)
    writer = next(k for k in metadata.kernels if k.name == "relax_disc.copy")
    assert [metadata.tensors[t].storage for t in writer.outputs] == [Storage.OVERWRITE]
    assert not writer.recomputable
    assert isinstance(after["main"].ret_ty, relax.TensorType)


def test_input_module_is_not_changed():
    module = Program(1, 1, [("scale", [0], 0.5)], [2]).module()
    before = module.script()
    lowered(module)
    assert module.script() == before


def test_metadata_survive_their_text():
    steps = [("rows", [], 0), ("split", [2], 0), ("flat", [3], 0), ("scale", [5], 1.5)]
    metadata = metadata_of(lowered(Program(1, 1, steps, [6, 4]).module()))
    assert PlanMetadata.from_json(metadata.to_json()) == metadata
    kinds = [kind for kernel in metadata.kernels for kind, _ in kernel.arguments]
    assert {"view", "integer", "float"} <= set(kinds)


def test_call_of_another_version_is_refused():
    with pytest.raises(ValueError, match="version 999"):
        PlanMetadata.from_json('{"version": 999}')


def test_functions_that_cannot_be_planned_stay():
    @I.ir_module
    class Module:
        @R.function
        def data_dependent(x: R.Tensor(("n",), "float32")):
            y = R.unique(x, sorted=True)
            return y

        @R.function
        def plain(x: R.Tensor(("n",), "float32")):
            n = T.int64()
            y = R.call_dps_packed("test.scale", (x, T.float64(2)), out_ty=R.Tensor((n,), "float32"))
            return y

    after = lowered(Module)
    names = {variable.name_hint for variable in after.get_global_vars()}
    assert names == {"data_dependent", "plain", "plain__session"}
    assert calls(after["data_dependent"]) == []
    assert calls(after["plain"])[0] == "enter"


def test_a_cast_that_names_a_known_dim():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32")):
            n = T.int64()
            m = T.int64()
            y = R.call_dps_packed(
                "test.scale", (x, T.float64(2)), out_ty=R.Tensor((n, 8), "float32")
            )
            z = R.match_cast(y, R.Tensor((m, 8), "float32"))
            out = R.call_dps_packed("test.add", (z, y), out_ty=R.Tensor((m, 8), "float32"))
            return out

    metadata = metadata_of(lowered(Module))
    assert [run_program(metadata.programs[t.bytes], [3]) for t in metadata.tensors] == [96, 96, 96]
