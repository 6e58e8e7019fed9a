"""Measured kernel times: they choose what is computed again, at all shapes, and nothing else."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import InputMismatchError
from relax_disc.training import calibration as calibrations
from relax_disc.training.calibration import Calibration
from relax_disc.vm_builtins import native
from relax_disc.vm_builtins.calibration import Measurement


class Net(nn.Module):
    """Some layers to choose among, cheap and dear ones, with dropout and a buffer."""

    def __init__(self):
        super().__init__()
        widths = (16, 64, 32, 16)
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return self.norm(x).square().mean()


def make():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def compiled():
    model, optimizer = make()
    shapes = ({0: Dim("rows", min=2, max=4096)},)
    return relax_disc.compile(model, optimizer, (torch.ones(4, 16),), dynamic_shapes=shapes)


def batch(rows):
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A cache of programs that all tests here share, so that each is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(programs, monkeypatch):
    """The cache without calibrations; it keeps the native library of the real one."""
    native.load()
    monkeypatch.setenv("RELAX_DISC_CACHE", str(programs))
    monkeypatch.delenv("RELAX_DISC_COMPILE_CACHE", raising=False)
    for path in programs.glob("programs/*.calibration"):
        path.unlink()
    return programs / "programs"


def state(step):
    tensors = [*step.model.state_dict().values(), step.rng_state]
    for values in step.optimizer.state.values():
        tensors += values.values()
    return [tensor.clone() for tensor in tensors]


def same(first, second):
    return all(map(torch.equal, first, second))


def tight(step, rows):
    """A budget half way from the least to the most that a shape can use."""
    step.memory_budget = None
    high = step.plan(rows=rows).peak_bytes
    step.memory_budget = step.plan(rows=rows).resident_bytes + 1
    low = step.plan(rows=rows).least_bytes
    step.memory_budget = None
    return low + (high - low) // 2


def test_leaves_no_trace_but_plans_by_what_it_measured(cache):
    step = compiled()
    step(batch(9))
    step(batch(5), update=False)
    sums = [p.grad.clone() for p in step.model.parameters()]
    before, unweighed = state(step), step.plan(rows=512)
    step.calibrate(batch(64), repeats=1)
    assert same(before, state(step))
    assert same(sums, [p.grad for p in step.model.parameters()])
    assert step.plan(rows=512).peak_bytes == unweighed.peak_bytes
    assert {name: len(found) for name, found in step.calibration.measurements.items()} == {
        "main": 1,
        "add_gradients": 1,
        "update_from_sum": 1,
    }
    step.calibrate(batch(1024), repeats=1)
    assert [each.dims for each in step.calibration.of("main")] == [(64,), (1024,)]
    step(batch(5))


def test_results_are_the_same_to_the_last_bit_and_plans_are_reproducible(cache):
    step, twin = compiled(), compiled()
    twin.rng_state = step.rng_state
    budget = tight(step, 512)
    names = step.session.kernel_names
    for shape in (64, 2048):  # as if products cost most by far
        times = tuple(shape * (1e6 if "matmul" in name else 10.0) for name in names)
        extra = Calibration(calibrations.machine_name(torch.device("cpu")))
        known = step.calibration or extra
        step.use_calibration(known.adding("main", Measurement((shape,), times)), "a test")
    step.memory_budget = twin.memory_budget = budget
    planned = step.plan(rows=512)
    assert planned.fits
    products = [any("matmul" in name for name in p.evicted) for p in (planned, twin.plan(rows=512))]
    assert products == [False, True]
    for rows in (512, 33, 512):
        assert torch.equal(step(batch(rows)), twin(batch(rows)))
    assert same(state(step), state(twin))
    step.memory_budget = 2 * budget
    step.plan(rows=512)
    step.memory_budget = budget
    assert step.plan(rows=512) == planned
    assert step.session.plan([512], budget).cache_hit


def test_drops_all_plans(cache):
    step = compiled()
    step(batch(64))
    assert step.session.counters().plans > 0
    step.use_calibration(Calibration(calibrations.machine_name(torch.device("cpu"))), "a test")
    assert step.session.counters().plans == 0


def test_is_saved_with_the_step_and_refused_on_another_machine(
    cache, tmp_path, monkeypatch, caplog
):
    step = compiled()
    step.calibrate(batch(64), repeats=1)
    budget = step.memory_budget = tight(step, 512)
    planned = step.session.plan([512], budget)
    path = tmp_path / "step"
    step.save(path)
    loaded = relax_disc.TrainingStep.load(path, *make())
    assert loaded.calibration == step.calibration
    assert loaded.session.plan([512], budget).time_ns == planned.time_ns
    assert loaded.session.plan([512], budget).sequence == planned.sequence
    assert not caplog.records
    for user in ("training.calibration", "training_step", "compiler"):
        monkeypatch.setattr(f"relax_disc.{user}.machine_name", lambda device: "another")
    other = relax_disc.TrainingStep.load(path, *make())
    assert other.calibration is None
    assert "not used on another" in caplog.text
    plain = compiled().session.plan([512], budget)
    assert other.session.plan([512], budget).time_ns == plain.time_ns
    other.rng_state = loaded.rng_state
    assert torch.equal(other(batch(512)), loaded(batch(512)))


def test_the_cache_keeps_it_for_each_machine(cache, monkeypatch, caplog):
    step = compiled()
    step.calibrate(batch(64), repeats=1)
    assert len(list(cache.glob("*.calibration"))) == 1
    again = compiled()
    assert again.calibration == step.calibration
    assert again.session.plan([512]).base_time_ns == step.session.plan([512]).base_time_ns
    with monkeypatch.context() as patch:
        patch.setattr("relax_disc.compiler.machine_name", lambda device: "another")
        assert compiled().calibration is None
    (path,) = cache.glob("*.calibration")
    path.write_bytes(path.read_bytes()[:-3])
    assert compiled().calibration is None
    assert "not calibrated" in caplog.text


def test_describes_itself_in_json():
    one = Calibration("here").adding("f", Measurement((3, 4), (1.5, 2.0)))
    two = one.adding("f", Measurement((1, 4), (1.0, 1.0))).adding("g", Measurement((), (3.0,)))
    assert [each.dims for each in two.of("f")] == [(1, 4), (3, 4)]
    assert Calibration.restore(json.loads(json.dumps(two.describe()))) == two
    assert copy.copy(one).of("none") == ()


def test_needs_a_run(cache):
    with pytest.raises(InputMismatchError, match="at least one"):
        compiled().calibrate(batch(4), repeats=0)
