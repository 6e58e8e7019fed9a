"""Tuning for CUDA without a GPU: what the model is told and says, the whole way of a kernel."""

import shutil
from importlib.util import find_spec

import pytest
import torch
from tvm import relax, tirx
from tvm.target import Target

import relax_disc  # noqa: F401  (registers the tags)
from relax_disc.tir_kernels import resolve_target
from relax_disc.tir_kernels.cuda import OneThread, one_thread
from relax_disc.tir_kernels.cuda.threads import launch
from relax_disc.tir_kernels.tuning import database as databases
from relax_disc.tir_kernels.tuning import search, tune
from relax_disc.tir_kernels.tuning.database import TuningDatabase, kernel_key
from relax_disc.tir_kernels.tuning.tasks import Task
from relax_disc.transform.schedule_kernels import schedule_kernel
from tests.cuda.emulator import Call, Counts, Emulator, Traffic
from tests.cuda.static_model import call_ns
from tests.cuda.tuning import Emulated
from tests.tir_kernels.kernel_runs import fused_kernel, tensor

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
    pytest.mark.skipif(
        any(find_spec(name) is None for name in search.NEEDED["random"]),
        reason="TVM's MetaSchedule needs cloudpickle and psutil",
    ),
]


@pytest.fixture
def target():
    return resolve_target("relax_disc/h100")


@pytest.fixture
def column_sum():
    n = tirx.Var("n", "int64")
    return fused_kernel([tensor("x", (n, 96))], lambda emit, x: emit(relax.op.sum(x, axis=[0])))


def test_a_sample_of_blocks_tells_for_all():
    """16 blocks of two warps; a warp reads 4 sectors at once, and writes 32."""
    source = """
extern "C" __global__ void scatter(float* out, float* x, int64_t n) {
  out[((int64_t)threadIdx.x) * 16 + ((int64_t)blockIdx.x)] = x[threadIdx.x];
}
"""
    emulator = Emulator.load()
    out, x = torch.zeros(1024), torch.zeros(64)
    scatter = emulator.add_source(source)["scatter"]
    for most in (3, 16, 99):
        with emulator.sampling(most):
            scatter(16, 64, out, x, 64)
        (counts,) = emulator.calls[-1].counts
        assert counts.instructions == pytest.approx(16 * 2 * 2)
        assert counts.sectors == pytest.approx(16 * 2 * (4 + 32))
        assert (counts.longest, counts.shared_bytes) == (2, 0)
        traffic = emulator.calls[-1].traffic
        assert (traffic["argument 0"].written, traffic["argument 1"].read) == (16 * 64, 16 * 8)
    scatter(16, 64, out, torch.ones(64), 64)
    assert out.eq(1).all() and not emulator.take_findings()


def call_of(blocks, threads, *, sectors, longest, shared_bytes=0, apart=4):
    """A call that reads an operand of so many sectors; its warps ask ``apart`` sectors at once."""
    counts = Counts(sectors / apart, sectors, longest, shared_bytes)
    traffic = {"x": Traffic(sectors, 0, sectors, 0)}
    return Call("k", [("k", (blocks, 1, 1, threads, 1, 1))], [counts], traffic)


def test_the_model_tells_what_limits_a_kernel(target):
    sectors = 1 << 21  # 64 MiB
    size = {"x": 32 * sectors}
    good = call_of(1 << 16, 256, sectors=sectors, longest=1)
    assert call_ns(good, size, target) == pytest.approx(3000 + size["x"] / 3350)
    one_block = call_of(1, 512, sectors=sectors, longest=sectors * 8 / 512)
    crowded = call_of(1 << 16, 256, sectors=sectors, longest=4, shared_bytes=200 << 10)
    again = call_of(1 << 16, 256, sectors=4 * sectors, longest=1)
    for worse in (one_block, crowded, again):
        assert call_ns(worse, size, target) > 1.3 * call_ns(good, size, target)


def test_a_database_of_a_gpu_knows_no_processor_and_is_asked_for(target, tmp_path, monkeypatch):
    monkeypatch.setenv("RELAX_DISC_CACHE", str(tmp_path))
    elsewhere = Target(dict(target.export()) | {"host": {"kind": "llvm", "mcpu": "znver4"}})
    assert databases.environment(elsewhere) == databases.environment(target)
    path = databases.user_path(target)
    entry = {"name": "k", "trace": [[], []], "from": None, "reason": "", "measured": []}
    TuningDatabase(databases.environment(target), {"a": entry}).write(path)
    assert databases.load(target, databases.USER) is None
    assert databases.load(target, path).decisions().keys() == {"a"}


@pytest.mark.filterwarnings("default")
def test_a_kernel_is_tuned_by_the_model(target, column_sum, tmp_path, monkeypatch):
    """A rule that does all in one thread is beaten; the trace holds at other sizes."""
    monkeypatch.setitem(tune.BENCHES, "cuda", Emulated)
    monkeypatch.setattr(tune, "rules_for", lambda _: [OneThread()])
    (n,) = (size for size in column_sum.params[0].shape if isinstance(size, tirx.Var))
    task = Task("k", kernel_key(column_sum), column_sum, (), ({n: n},))
    how = search.Search(trials=2, cost_model="random")
    plan = tune.Plan({"n": 200}, [{"n": 1}, {"n": 77}], {"n": (1, 400)}, ("tvm",), how)
    empty = TuningDatabase(databases.environment(target))
    found = tune.tune_kernels([task], target, plan, empty, tmp_path / "tuned.json").kernels
    entry = found[task.key]
    assert entry["trace"] is not None, entry
    assert all(timing["modelled"] for timing in entry["measured"])
    assert entry["measured"][0]["ratio"] < 0.8


@pytest.mark.filterwarnings("default")
def test_a_candidate_that_races_is_refused(target, column_sum, monkeypatch):
    """All threads of a block add to the same elements."""
    rule = schedule_kernel(column_sum, target, [OneThread()])
    monkeypatch.setattr(one_thread, "launch", lambda blocks, _, body: launch(blocks, 32, body))
    assert schedule_kernel(column_sum, target, [OneThread()]).same_as(column_sum)
    schedule = OneThread().apply(column_sum, target)
    assert schedule is not None
    racing = schedule.mod["main"].with_attr("tirx.is_scheduled", True)
    (n,) = (size for size in column_sum.params[0].shape if isinstance(size, tirx.Var))
    assert Emulated.differences(column_sum, rule, rule, target, [{n: 70}]) is None
    assert "race" in Emulated.differences(column_sum, rule, racing, target, [{n: 70}])
