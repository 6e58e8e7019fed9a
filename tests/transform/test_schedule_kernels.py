"""The pass: attributes, what it leaves alone, and rules that fail."""

import logging
import time

import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.relax.backend.cpu_generic import pipeline as stock

from relax_disc.tir_kernels import cpu_target
from relax_disc.transform import schedule_kernels
from relax_disc.transform.schedule_kernels import ScheduleKernels

TARGET = cpu_target()
N = tirx.Var("n", "int64")


def legalized(build, *shapes):
    params = [
        relax.Var(f"x{index}", relax.TensorType(list(shape), "float32"))
        for index, shape in enumerate(shapes)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, *params))
        builder.emit_func_output(out)
    with TARGET:
        return tvm.transform.Sequential(stock.legalize_passes(TARGET))(builder.get())


def kernels(mod):
    return {v.name_hint: f for v, f in mod.functions.items() if isinstance(f, tirx.PrimFunc)}


def test_scheduled_kernels_say_so():
    mod = legalized(lambda emit, x: relax.op.exp(x), (N, 40))
    (kernel,) = kernels(ScheduleKernels(TARGET)(mod)).values()
    assert kernel.attrs["tirx.is_scheduled"]
    assert [list(pair) for pair in kernel.attrs["relax_disc.inplace"]] == [[0, 1]]
    assert "global_symbol" not in kernel.attrs


def test_input_module_stays():
    mod = legalized(lambda emit, x: relax.op.exp(x), (N, 40))
    text = mod.script()
    ScheduleKernels(TARGET)(mod)
    assert mod.script() == text


def test_a_second_time_changes_nothing():
    mod = ScheduleKernels(TARGET)(legalized(lambda emit, x: relax.op.exp(x), (N, 40)))
    tvm.ir.assert_structural_equal(ScheduleKernels(TARGET)(mod), mod)


def test_reshapes_are_left_for_the_alias_pass():
    mod = legalized(lambda emit, x: relax.op.reshape(x, (N * 40,)), (N, 40))
    mod = ScheduleKernels(TARGET)(mod)
    (kernel,) = kernels(mod).values()
    assert relax.analysis.has_reshape_pattern(kernel)


def test_first_rows_are_no_reshape():
    def first_rows(emit, x):
        return relax.op.strided_slice(x, [0], [0], [N], assume_inbound=True)

    mod = legalized(first_rows, (512, 40))
    assert all(relax.analysis.has_reshape_pattern(kernel) for kernel in kernels(mod).values())
    (kernel,) = kernels(ScheduleKernels(TARGET)(mod)).values()
    assert kernel.attrs["tirx.is_scheduled"]


def test_a_failing_rule_is_said_and_the_kernel_kept(monkeypatch, caplog):
    class Broken:
        def apply(self, func, target, tunable):
            raise ValueError("not today")

    monkeypatch.setattr(schedule_kernels, "rules_for", lambda target: [Broken()])
    mod = legalized(lambda emit, x: relax.op.exp(x), (N, 40))
    with caplog.at_level(logging.WARNING):
        kept = ScheduleKernels(TARGET)(mod)
    assert "Broken failed on" in caplog.text
    tvm.ir.assert_structural_equal(kept, mod)


def test_a_target_is_needed():
    mod = legalized(lambda emit, x: relax.op.exp(x), (N, 40))
    with pytest.raises(tvm.error.InternalError, match="context required"):
        ScheduleKernels()(mod)


def test_a_schedule_that_makes_no_code_is_put_back(monkeypatch, caplog):
    class Unknown:
        """A rule whose kernel calls what LLVM does not know."""

        def apply(self, func, target, tunable):
            def call(value, mutator):
                return tvm.ir.Call("tirx.cosh", [value.args[0]], ret_ty="float32x4")

            body = tvm_ffi.structural_mutate(func.body, (tvm.ir.Call, call))
            return s_tir.Schedule(func.with_body(body))

    monkeypatch.setattr(schedule_kernels, "rules_for", lambda target: [Unknown()])
    mod = legalized(lambda emit, x: relax.op.exp(x), (N, 40))
    with caplog.at_level(logging.WARNING):
        kept = ScheduleKernels(TARGET)(mod)
    assert "cannot be lowered" in caplog.text
    tvm.ir.assert_structural_equal(kept, mod)


def test_long_chains_compile_in_linear_time():
    """Each value is used twice; TVM's passes alone would take 3^links steps."""

    def chain(emit, x):
        for _ in range(16):
            x = emit(relax.op.add(emit(relax.op.multiply(x, x)), x))
        return relax.op.exp(x)

    start = time.process_time()
    (kernel,) = kernels(ScheduleKernels(TARGET)(legalized(chain, (N, 40)))).values()
    tvm.compile(tvm.IRModule({"chain": kernel.with_attr("global_symbol", "chain")}), TARGET)
    assert time.process_time() - start < 20
