"""The whole pipeline against TVM's own, from one build each."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_disc.compiler import build
from relax_disc.pipeline import PipelineOptions, pipeline
from relax_disc.transform import schedule_kernels
from relax_disc.vm_builtins.session import Session

TARGET = tvm.target.Target("llvm")


@I.ir_module
class Mixed:
    """Fused kernels, aliases of parameters and results, tuples, scalars, integers, constants."""

    @R.function
    def main(
        x: R.Tensor(("n", 64), "float32"),
        w: R.Tensor((64, 32), "float32"),
        pair: R.Tuple(R.Tensor((32,), "float32"), R.Tensor((32,), "float32")),
    ):
        n = T.int64()
        with R.dataflow():
            hidden = R.nn.relu(R.add(R.matmul(x, w), pair[0]))
            rows = R.nn.softmax(hidden, axis=-1)
            flat = R.reshape(rows, (n * 32,))
            scaled = R.multiply(flat, R.const(2.0, "float32"))
            count = R.arange(0, n, 1, dtype="int64")
            halves = R.split(rows, 2, axis=1)
            total = R.max(halves[0])
            both = R.concat([halves[1], halves[0]], axis=0)
            out = (scaled, (total, count), x, R.reshape(x, (n * 64,)), both, pair, flat)
            R.output(out)
        return out

    @R.function
    def second(x: R.Tensor(("m", "k"), "float32")):
        m = T.int64()
        with R.dataflow():
            y = R.add(x, x)
            z = R.sum(R.multiply(y, x), axis=1)
            out = R.reshape(R.tanh(z), (m, 1))
            R.output(out)
        return out

    @R.function
    def branch(flag: R.Tensor((), "bool"), x: R.Tensor(("n",), "float32")) -> R.Tensor(
        ("n",), "float32"
    ):
        if flag:
            y = R.add(x, x)
        else:
            y = R.multiply(x, x)
        return y


def flat(value):
    """All arrays of a nested result."""
    if isinstance(value, tvm.runtime.Tensor):
        return [value.numpy()]
    return [array for part in value for array in flat(part)]


def tensors(seed, *shapes):
    generator = np.random.default_rng(seed)
    return [
        tvm.runtime.tensor(generator.standard_normal(shape).astype("float32")) for shape in shapes
    ]


@pytest.fixture(scope="module")
def machines():
    ours = relax.build(Mixed, TARGET, relax_pipeline="relax_disc")
    stock = relax.build(Mixed, TARGET, relax_pipeline=relax.get_default_pipeline(TARGET))
    return tuple(relax.VirtualMachine(executable, tvm.cpu()) for executable in (ours, stock))


@pytest.mark.parametrize("n", [1, 7, 64, 3, 200])
def test_results_equal_the_stock_pipeline(machines, n):
    x, w, b, c = tensors(n, (n, 64), (64, 32), (32,), (32,))
    mine, theirs = (flat(machine["main"](x, w, (b, c))) for machine in machines)
    assert len(mine) == len(theirs)
    for first, second in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (17, 40)])
def test_every_function_of_a_module(machines, shape):
    (x,) = tensors(0, shape)
    mine, theirs = (machine["second"](x).numpy() for machine in machines)
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert Session.of(machines[0], "second").report().dims == shape


@pytest.mark.parametrize("flag", [True, False])
def test_control_flow_is_left_to_the_stock_passes(machines, flag):
    (x,) = tensors(0, (5,))
    mine, theirs = (
        machine["branch"](tvm.runtime.tensor(np.array(flag)), x).numpy() for machine in machines
    )
    np.testing.assert_array_equal(mine, theirs)


def test_peak_is_counted_as_it_was_planned(machines):
    session = Session.of(machines[0], "main")
    for n in (1, 30, 4):
        machines[0]["main"](*tensors(n, (n, 64), (64, 32)), tuple(tensors(n, (32,), (32,))))
        report = session.report()
        assert report.peak_bytes == report.planned_peak_bytes == session.plan([n]).peak_bytes


def test_registered_by_name_and_does_not_change_its_input():
    before = Mixed.script()
    relax.build(Mixed, TARGET, relax_pipeline="relax_disc")
    assert Mixed.script() == before


def test_functions_that_call_functions_and_the_same_tensor_twice():
    @I.ir_module
    class Calls:
        @R.function(private=True)
        def inner(x: R.Tensor(("n", 8), "float32")) -> R.Tensor(("n", 8), "float32"):
            y = R.add(x, R.tanh(x))
            return y

        @R.function
        def main(x: R.Tensor(("n", 8), "float32")):
            cls = Calls
            once = cls.inner(x)
            twice = cls.inner(once)
            return (R.multiply(twice, once), once, once)

    ours = relax.build(Calls, TARGET, relax_pipeline="relax_disc")
    stock = relax.build(Calls, TARGET, relax_pipeline=relax.get_default_pipeline(TARGET))
    for n in (1, 6):
        (x,) = tensors(n, (n, 8))
        results = [flat(relax.VirtualMachine(each, tvm.cpu())["main"](x)) for each in (ours, stock)]
        for mine, theirs in zip(*results, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_overlapping_arguments_of_one_call():
    """The caller may pass one tensor for two parameters; nothing is written into either."""

    @I.ir_module
    class Two:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), y: R.Tensor(("n", 8), "float32")):
            with R.dataflow():
                z = R.subtract(R.multiply(x, y), R.add(x, y))
                R.output(z)
            return z

    machine = relax.VirtualMachine(relax.build(Two, TARGET, relax_pipeline="relax_disc"), tvm.cpu())
    (x,) = tensors(0, (5, 8))
    before = x.numpy().copy()
    result = machine["main"](x, x).numpy()
    np.testing.assert_allclose(result, before * before - 2 * before, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(x.numpy(), before)


def test_the_module_is_written_after_each_phase(tmp_path):
    folder = tmp_path / "new" / "dumps"
    options = PipelineOptions(dump_to=folder)
    dumped = relax.build(Mixed, TARGET, relax_pipeline=pipeline(options))
    assert sorted(path.name for path in folder.iterdir()) == [
        "01-simplify.py",
        "02-libraries.py",
        "03-fusion.py",
        "04-kernels.py",
        "05-memory.py",
        "06-finalize.py",
    ]
    text = {path.stem[3:]: path.read_text() for path in folder.iterdir()}
    assert "R.nn.softmax" in text["simplify"] and "R.nn.softmax" not in text["fusion"]
    assert "T.parallel" in text["kernels"] and "T.parallel" not in text["fusion"]
    assert "relax_disc.enter" in text["memory"] and "relax_disc.enter" not in text["kernels"]
    assert all("def main" in each for each in text.values())
    plain = relax.build(Mixed, TARGET, relax_pipeline=pipeline())
    assert dumped.as_text() == plain.as_text()
    (folder / "04-kernels.py").write_text("of an earlier run")
    relax.build(Mixed, TARGET, relax_pipeline=pipeline(options))
    assert (folder / "04-kernels.py").read_text() == text["kernels"]
    assert len(list(folder.iterdir())) == 6


def test_kernels_are_verified_only_after_code_generation_failed(monkeypatch, caplog):
    class Unknown:
        """A rule whose kernel calls what LLVM does not know."""

        def apply(self, func, target, tunable):
            def call(value, mutator):
                return tvm.ir.Call("tirx.cosh", [value.args[0]], ret_ty="float32x4")

            body = tvm_ffi.structural_mutate(func.body, (tvm.ir.Call, call))
            return None if body.same_as(func.body) else s_tir.Schedule(func.with_body(body))

    lowered = []
    lowers = schedule_kernels._lowers
    monkeypatch.setattr(
        schedule_kernels, "_lowers", lambda *given: lowered.append(given) or lowers(*given)
    )
    build(Mixed, TARGET)
    assert not lowered
    broken = [Unknown(), *schedule_kernels.rules_for(TARGET)]
    monkeypatch.setattr(schedule_kernels, "rules_for", lambda target: broken)
    with caplog.at_level("WARNING"):
        executable = build(Mixed, TARGET)
    assert lowered and "cannot be lowered" in caplog.text
    (x,) = tensors(0, (4, 3))
    found = relax.VirtualMachine(executable, tvm.cpu())["second"](x).numpy()
    np.testing.assert_allclose(
        found, np.tanh(2 * (x.numpy() ** 2).sum(1, keepdims=True)), rtol=1e-5
    )
