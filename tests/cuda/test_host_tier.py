"""Tensors kept in pinned memory meanwhile, on streams that run out of step: same bits, no waiting.

Emulated: `streams.py`. What a wait is missing for must be seen, so broken builds are run, too.
"""

from __future__ import annotations

import copy
import itertools
import shutil
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import tvm_ffi

import relax_disc
from relax_disc import HostTier
from relax_disc.errors import (
    InputMismatchError,
    MemoryBudgetError,
    OffloadError,
    OutOfMemoryError,
)
from relax_disc.pipeline import PipelineOptions
from relax_disc.tir_kernels.target import cuda_target
from relax_disc.vm_builtins.libraries import cuda_memory
from tests.cuda.emulator import Emulator
from tests.cuda.stand_in import ENTRY_WAITS, WaitsRecorded, cuda_stand_in
from tests.cuda.streams import Streams
from tests.frontend.models import Llama, dims, token_batch
from tests.placement import check_plan
from tests.tiers import every

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

SHAPE = {"b": 4, "s": 24}
BATCH = token_batch(*SHAPE.values())
FAST = 4e11  # bytes per s: so fast that plans reload
LATE = ("copies", "kernels", "chance")


def compiled(model, **options):
    b, s = dims()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = relax_disc.compile(
        *(model, optimizer, token_batch(3, 12)),
        dynamic_shapes=({0: b, 1: s}, {0: b, 1: s}),
        options=PipelineOptions(remove_padding=False),  # the sizes are all that plans ask for
        **options,
    )
    return step, optimizer


class Trained:
    """A step for CUDA, the state from which every run starts, and what it comes to."""

    def __init__(self, emulator):
        self.emulator = emulator
        torch.manual_seed(0)
        self.model = Llama(layers=2, width=64)
        self.step, self.optimizer = compiled(self.model, target=cuda_target("sm_90"))
        self.step(*token_batch(2, 5))
        self._saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.unlimited = self.step.plan(**SHAPE)
        self.step.session.release()
        self.expected = self.run(Streams(emulator, "copies"))
        self.expected_next = self.go_on(Streams(emulator, "copies"))

    def state(self):
        tensors = [p.detach().clone() for p in self.model.parameters()]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += [value.clone() for value in state.values()]
        return tensors

    def load(self):
        self.model.load_state_dict(self._saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self._saved[1]))

    def run(self, streams):
        """Train the first step."""
        self.load()
        return self.go_on(streams)

    def go_on(self, streams):
        """Train one more step, on memory that holds NaN."""
        streams.poison()
        with streams.running():
            loss = self.step(*BATCH)
        streams.finish()
        return [loss.clone(), *self.state()]

    def limit(self, tier, part):
        """Offload to a tier, with so much of the memory between the least budget and none."""
        self.step.offload_to, self.step.memory_budget = tier, 1
        least = self.step.plan(**SHAPE).least_bytes
        self.step.memory_budget = int(least + part * (self.unlimited.peak_bytes - least))
        return self.step.plan(**SHAPE)


@pytest.fixture(scope="module")
def kept():
    emulator = Emulator.load()
    emulator.take_findings()
    with cuda_stand_in(emulator), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RELAX_DISC_COMPILE_CACHE", "0")
        yield Trained(emulator)
    emulator.memory = None
    assert not emulator.take_findings()


@pytest.fixture
def trained(kept):
    yield kept
    tvm_ffi.get_global_func("relax_disc.fail_allocation")(-1)
    kept.step.memory_budget = kept.step.offload_to = None
    kept.step.session.release()
    kept.emulator.memory.clear()
    kept.emulator.forget()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


CASES = [*((0.0, False, late) for late in LATE), (0.3, True, "copies"), (0.6, False, "kernels")]


@pytest.mark.parametrize(
    ("part", "recompute", "late"),
    every(3, [pytest.param(*case) for case in CASES]),
)
def test_results_are_bit_identical_and_budgets_hold(trained, part, recompute, late):
    plan = trained.limit(HostTier(bytes_per_s=FAST, recompute=recompute), part)
    assert plan.fits and plan.reloaded_bytes > 0
    assert recompute or not plan.evicted
    assert plan.offload_buffer_bytes == 0
    budget = trained.step.memory_budget
    check_plan(trained.step.session, list(SHAPE.values()), budget, buffer=False)
    streams = Streams(trained.emulator, late)
    assert same(trained.run(streams), trained.expected)
    report = trained.step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes == plan.peak_bytes <= budget
    assert (report.offloaded_bytes, report.reloaded_bytes) == (
        *(plan.offloaded_bytes, plan.reloaded_bytes),
    )
    assert report.recomputations == len(plan.evicted)
    pinned = [event for event in trained.emulator.events if event.startswith("pin")]
    assert pinned == [f"pin {plan.offload_space_bytes}"]


def test_the_caller_never_waits_and_copies_are_asked_for_in_the_plans_order(trained):
    trained.limit(HostTier(bytes_per_s=FAST, recompute=False), 0.0)
    trained.run(Streams(trained.emulator, "copies"))
    trained.emulator.forget()
    streams = Streams(trained.emulator, "copies")
    with WaitsRecorded(trained.emulator):
        found = trained.go_on(streams)
    assert same(found, trained.expected_next)
    events = trained.emulator.events
    assert not any(event.startswith("pin") for event in events), "the buffer stays"
    assert "synchronise" not in (*events, *streams.asked)
    assert {event for event in events if event.startswith("wait")} <= ENTRY_WAITS
    # Every copy begins with a wait for the kernels before it, and nothing stands between.
    copies = ("offload", "reload")
    for before, this in itertools.pairwise(streams.asked):
        assert (before == "copies wait") == (this in copies)
    facts = trained.step.session.plan(list(SHAPE.values()), trained.step.memory_budget)
    asked = [copies[transfer.is_read] for transfer in facts.transfers]
    assert [each for each in streams.asked if each in copies] == asked
    # What follows a step on the device finds all copies done.
    last = max(k for k, each in enumerate(streams.asked) if each in copies)
    assert any(each.startswith("kernels wait") for each in streams.asked[last:])


@pytest.mark.parametrize(
    ("ignored", "late"),
    [
        ("copies wait", "kernels"),
        ("kernels wait for offloads", "copies"),
        ("kernels wait for reloads", "copies"),
    ],
)
def test_a_missing_wait_is_seen(trained, ignored, late):
    trained.limit(HostTier(bytes_per_s=FAST, recompute=False), 0.0)
    broken = Streams(trained.emulator, late, {ignored})
    assert not same(trained.run(broken), trained.expected)
    assert ignored in broken.asked
    assert same(trained.run(Streams(trained.emulator, late)), trained.expected)


def test_a_longer_batch_gets_a_larger_buffer(trained):
    tier = HostTier(bytes_per_s=FAST, recompute=False)
    trained.limit(tier, 0.0)
    small = {"b": 4, "s": 20}
    trained.step.memory_budget = trained.step.plan(**small).least_bytes
    with (streams := Streams(trained.emulator, "copies")).running():
        trained.step(*token_batch(*small.values()))
        trained.limit(tier, 0.0)
        trained.step(*BATCH)
    streams.finish()
    assert same(trained.run(Streams(trained.emulator, "chance")), trained.expected)
    pinned = [int(e.split()[1]) for e in trained.emulator.events if e.startswith("pin")]
    assert len(pinned) == 2 and pinned[0] < pinned[1]


@pytest.mark.parametrize("countdown", range(3))  # arena, result, pinned memory
def test_refused_memory_changes_nothing(trained, countdown):
    trained.limit(HostTier(bytes_per_s=FAST, recompute=False), 0.0)
    trained.load()
    before = trained.state()
    tvm_ffi.get_global_func("relax_disc.fail_allocation")(countdown)
    with (
        (streams := Streams(trained.emulator, "copies")).running(),
        pytest.raises(OutOfMemoryError, match="nothing was changed"),
    ):
        trained.step(*BATCH)
    streams.finish()
    assert same(before, trained.state())
    assert same(trained.run(Streams(trained.emulator, "copies")), trained.expected)


def test_pytorch_refusing_pinned_memory_is_named(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(OutOfMemoryError, match=r"4096 bytes of pinned memory.*nothing was changed"):
        cuda_memory.pinned(4096)


def test_a_kernel_that_fails_leaves_no_copy_behind(trained, monkeypatch):
    """What follows on the device's stream, such as another use of the arena, waits for copies."""
    trained.limit(HostTier(bytes_per_s=FAST, recompute=False), 0.0)
    streams = Streams(trained.emulator, "copies")
    trained.load()

    def put(stream, item, put=streams._put):
        put(stream, item)
        if streams.asked.count("offload") == 3 and streams.asked[-1] == "kernel":
            monkeypatch.undo()
            raise RuntimeError("the device gives up")

    monkeypatch.setattr(streams, "_put", put)
    with streams.running(), pytest.raises(RuntimeError, match="gives up"):
        trained.step(*BATCH)
    assert streams.asked[-1] == "kernels wait for offloads"
    streams.finish()
    assert same(trained.run(Streams(trained.emulator, "copies")), trained.expected)


def test_what_cannot_be_a_tier_is_refused(trained, tmp_path):
    with pytest.raises(OffloadError, match='folder; say offload_to="host"'):
        trained.step.offload_to = tmp_path
    trained.step.offload_to = "host"
    assert isinstance(trained.step.offload_to, HostTier)
    with pytest.raises(InputMismatchError, match="folder"):
        trained.step.offload = "optimizer"
    with pytest.raises(InputMismatchError, match="positive"):
        HostTier(bytes_per_s=0)
    trained.step.offload_to, trained.step.memory_budget = None, trained.unlimited.state_bytes
    with pytest.raises(MemoryBudgetError, match="offload_to"):
        trained.step(*BATCH)


def test_plans_without_a_device_go_by_the_targets_figures(trained):
    """A tag names them; a copy takes its bytes' time and that of a launch."""
    trained.limit(HostTier(recompute=False), 0.0)
    facts = trained.step.session.plan(list(SHAPE.values()), trained.step.memory_budget)
    machine, sizes = trained.step.session.metadata.machine, _bytes_of(trained.step.session, facts)
    assert machine.host_bytes_per_ns == 32.0 and facts.transfers
    for transfer, size in zip(facts.transfers, sizes, strict=True):
        expected = int(machine.overhead_ns) + int(size / machine.host_bytes_per_ns)
        assert transfer.end_ns - transfer.begin_ns == expected


def _bytes_of(session, facts):
    values = session.values(list(SHAPE.values()))
    for transfer in facts.transfers:
        tensor = session.metadata.tensors[facts.versions[transfer.version].tensor]
        yield -(-values[tensor.bytes] // 256) * 256


def test_a_device_is_measured_once(monkeypatch):
    """Speeds follow from times of large copies less those of small ones."""
    asked = []

    def times(device, size, repeats):
        asked.append(size)
        return 5_000 + size / 20, 5_000 + size / 25

    monkeypatch.setattr(cuda_memory, "host_copy_times", times)
    tier, device = HostTier(), torch.device("cuda", 0)
    machine = relax_disc.vm_builtins.plan_metadata.Machine(host_bytes_per_ns=32.0)
    handle = tier.handle_on(machine, device)
    found = tvm_ffi.get_global_func("relax_disc.tier_figures")(handle)
    assert dict(found) == {
        "write_bytes_per_s": 2e10,
        "read_bytes_per_s": 2.5e10,
        "latency_ns": 5200,
        "buffer_bytes": 0,
    }
    count = len(asked)
    assert tier.handle_on(machine, device).same_as(handle) and len(asked) == count


def test_copies_are_timed_on_a_stream_of_their_own(monkeypatch):
    """Events a microsecond apart: each copy lies between two."""
    recorded = []

    class Event(mock.Mock):
        def record(self, stream):
            recorded.append((self, stream))

        def elapsed_time(self, end):
            times = [event for event, _ in recorded]
            return 1e-3 * (times.index(end) - times.index(self))

    stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", lambda chosen: nullcontext())
    monkeypatch.setattr(cuda_memory, "pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
    assert cuda_memory.host_copy_times(torch.device("cpu"), 64, 3) == pytest.approx((1e3, 1e3))
    assert len(recorded) == 12 and all(each is stream for _, each in recorded)
    stream.wait_stream.assert_called_once_with("the caller's")
