"""CUDA graphs of a step's calls, on the stand-in: the same bits, refusals with their reason."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import relax_disc
from relax_disc.errors import InputMismatchError
from relax_disc.tir_kernels.target import cuda_target
from relax_disc.training.call import graphs
from tests.cuda.stand_in import (
    ENTRY_WAITS,
    Recorder,
    WaitsRecorded,
    emulator_without_findings,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

TARGET = cuda_target("sm_90")


class Reader(nn.Module):
    """An embedding, dropout and a head, of a few numbers."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 20)

    def forward(self, ids):
        x = self.drop(self.norm(self.table(ids)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()), x.sum()


def batch(*shape):
    return torch.randint(20, shape)


def compiled(model, cuda_graphs=True, **options):
    rows, length = Dim("rows", min=1, max=64), Dim("length", min=1, max=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return relax_disc.compile(
        *(model, optimizer, (batch(3, 4),)),
        dynamic_shapes=({0: rows, 1: length},),
        target=TARGET,
        cuda_graphs=cuda_graphs,
        **options,
    )


@pytest.fixture
def device(monkeypatch):
    """The emulator and what records on it."""
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    with emulator_without_findings() as emulator:
        recorder = Recorder(emulator)
        with recorder.running():
            yield emulator, recorder


def state_of(model, step):
    moments = step.optimizer.state_dict()["state"].items()
    return {**model.state_dict(), **{f"{k}.{n}": x for k, s in moments for n, x in s.items()}}


def test_replayed_calls_make_the_same_bits(device):
    emulator, recorder = device
    torch.manual_seed(0)
    model = Reader()
    twin = copy.deepcopy(model)
    step, plain = compiled(model), compiled(twin, cuda_graphs=False)
    results = []
    # A longer batch moves the arena; what was captured before reads it where it is now.
    shapes = [(3, 4), (3, 4), (2, 5), (3, 4), (2, 5), (30, 9), (3, 4), (3, 4), (30, 9), (2, 5)]
    for number, shape in enumerate(shapes):
        ids = batch(*shape)
        found = []
        for each in (step, plain):
            each.optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
            torch.manual_seed(number)
            emulator.seed += 1
            emulator.forget()
            with WaitsRecorded(emulator):
                found.append(pytree.tree_leaves(each(ids)))
            if each is step:
                events = list(emulator.events)
        results.append((found[0], [x.clone() for x in found[1]]))
        assert step.memory_report().peak_bytes == step.memory_report().planned_peak_bytes
        assert step.memory_report().shape == plain.memory_report().shape
        check_replay(events, plain_events=list(emulator.events))
    for found, wanted in results:  # none has been written over
        assert all(map(torch.equal, found, wanted))
    assert all(torch.equal(x, state_of(twin, plain)[n]) for n, x in state_of(model, step).items())
    report = step.graph_report()
    assert report.plain_calls[graphs.FIRST] == 3
    assert report.graphs == 3
    # Both graphs captured before the arena moved are captured again.
    assert report.captures == len(recorder.graphs) == 5
    assert report.replays == len(shapes) - 3
    assert "5 captured" in str(report)


def check_replay(events, plain_events):
    """A replay launches what a plain call does, allocates nothing, and waits for nothing more."""
    if "replay" not in events:
        return
    work = [event for event in plain_events if event.startswith(("launch", "library"))]
    replayed = events[events.index("replay") + 1 :]
    assert [e for e in replayed if e.startswith(("launch", "library"))] == work
    if "capture" not in events:
        assert "allocate" not in events
    assert "synchronise" not in events
    assert {event for event in events if event.startswith("wait")} <= ENTRY_WAITS


def test_what_pytorch_replaces_is_captured_again(device):
    _, recorder = device
    model = Reader().eval()
    twin = copy.deepcopy(model)
    step, plain = compiled(model), compiled(twin, cuda_graphs=False)
    ids = batch(3, 4)
    for number in range(6):
        losses = [each(ids)[0] for each in (step, plain)]
        assert torch.equal(*losses)
        if number in (2, 3):
            for each in (step, plain):
                each.optimizer.load_state_dict(copy.deepcopy(each.optimizer.state_dict()))
                each.model.head.weight.data = each.model.head.weight.data.clone()
    assert len(recorder.graphs) == 3
    assert step.graph_report().replays == 5


def test_calls_without_a_graph_say_why(device, tmp_path):
    _, recorder = device
    step = compiled(Reader())
    ids = batch(3, 4)
    step(ids)
    step.check_finite = True
    step(ids)
    step.check_finite = False
    step(ids, update=False)
    step(ids)
    step.calibrate(ids, repeats=1)  # runs once to get warm, and once to measure
    step.memory_budget = step.plan(rows=3, length=4).peak_bytes
    for _ in range(2):
        step(ids)
    step.offload_to = "host"
    step(ids)
    step.offload_to = None
    report = step.graph_report()
    assert report.plain_calls[graphs.CHECKED] == 1
    assert report.plain_calls[graphs.SUMMED] == 2 + 2 * 2  # calibrate runs those functions, too
    assert report.plain_calls[graphs.MEASURED] == 1
    assert report.plain_calls[graphs.NO_ROOM] == 2
    assert report.plain_calls[graphs.OFFLOADED] == 1
    assert len(recorder.graphs) == 1
    # With room for the copy of the batch it is captured, when there is an arena again.
    step.memory_budget += ids.nbytes
    step.session.release()
    for _ in range(3):
        step(ids)
    assert (step.graph_report().captures, step.graph_report().replays) == (2, 1 + 2)
    assert step.graph_report().static_bytes == ids.nbytes
    step.save(tmp_path / "step")
    again = relax_disc.TrainingStep.load(tmp_path / "step", step.model, step.optimizer)
    assert again.graph_report() is not None


class Picky(nn.Module):
    """A check of the model's own, which waits for the device inside the program."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        y = self.head(x)
        torch._assert_async((y < 1e9).all(), "too large")
        return y.square().mean()


def test_what_reads_on_the_host_is_not_captured(device):
    model = Picky()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = relax_disc.compile(
        *(model, optimizer, (torch.randn(3, 4),)),
        dynamic_shapes=({0: Dim("rows", min=1, max=64)},),
        target=TARGET,
        cuda_graphs=True,
    )
    x = torch.randn(5, 4)
    losses = [float(step(x)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    report = step.graph_report()
    assert report.captures == report.replays == 0
    assert sum(report.plain_calls.values()) == 4
    assert any("checks of the model" in why for why in report.plain_calls)
    assert torch.cuda.current_stream().cuda_stream == 0


def test_graphs_are_bounded(device, monkeypatch):
    _, recorder = device
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    step = compiled(Reader())
    for _ in range(3):
        for rows in (4, 3, 2):
            step(batch(rows, 4))
    # Shapes that are called as often as others do not take each other's place.
    assert step.graph_report().graphs == len(recorder.graphs) == 2
    assert step.graph_report().plain_calls[graphs.FULL] == 2
    step(batch(2, 4))
    assert step.graph_report().plain_calls[graphs.FULL] == 3
    step(batch(2, 4))
    assert step.graph_report().graphs == 2
    assert len(recorder.graphs) == 3


def test_graphs_are_refused_where_there_are_none():
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InputMismatchError, match="CUDA"):
        relax_disc.compile(model, optimizer, (batch(3, 4),), dynamic_shapes=None, cuda_graphs=True)
    with pytest.raises(InputMismatchError, match=r"p\.grad"):
        relax_disc.compile(
            *(model, None, (batch(3, 4),)), dynamic_shapes=None, cuda_graphs=True, target=TARGET
        )


def test_compiled_code_runs_on_the_current_stream(device, monkeypatch):
    """Kernels and library calls are asked for on the stream that PyTorch's kernels would use."""
    import tvm_ffi

    from relax_disc.training.call import streams

    emulator, recorder = device
    place = tvm_ffi.device("cuda", 0)
    monkeypatch.setattr(
        "relax_disc.training.compiled_function.on_current_stream",
        lambda device: streams.on_current_stream(torch.device("cuda", 0)),
    )
    found = []
    ask = emulator.ask
    monkeypatch.setattr(
        emulator, "ask", lambda work: (found.append(tvm_ffi.get_raw_stream(place)), ask(work))
    )
    step = compiled(Reader(), cuda_graphs=False)
    with recorder.on(replace(torch.cuda.current_stream(), cuda_stream=7)):
        step(batch(3, 4))
    assert set(found) == {7}
    assert tvm_ffi.get_raw_stream(place) == 0
