"""Tensors kept in a folder meanwhile: same bits, budgets held, every failure of the disk seen."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import tvm_ffi

import relax_disc
from relax_disc import FileTier
from relax_disc.errors import (
    InputMismatchError,
    MemoryBudgetError,
    OffloadError,
    OutOfMemoryError,
    StepTornError,
)
from relax_disc.pipeline import PipelineOptions
from tests.frontend.models import Llama, dims, token_batch
from tests.placement import check_plan
from tests.tiers import every

BATCH = token_batch(8, 48)
FAST = 4e10  # bytes per s: so fast that plans reload
WAYS = ("error", "full", "short", "end", "changed")


def native(name):
    relax_disc.vm_builtins.runtime.load()
    return tvm_ffi.get_global_func(f"relax_disc.{name}")


class Trained:
    """A step of a small model, and the state from which every run starts."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = Llama(layers=3, width=64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        b, s = dims()
        self.step = relax_disc.compile(
            self.model,
            self.optimizer,
            token_batch(3, 12),
            dynamic_shapes=({0: b, 1: s}, {0: b, 1: s}),
            options=PipelineOptions(remove_padding=False),  # the sizes are all that plans ask for
        )
        self.step(*token_batch(2, 5))
        self._saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        self.unlimited = self.step.plan(b=8, s=48)
        self.expected = self.run()

    def load(self):
        self.model.load_state_dict(self._saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self._saved[1]))

    def state(self):
        tensors = [p.detach().clone() for p in self.model.parameters()]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += [value.clone() for value in state.values()]
        return tensors

    def run(self):
        self.load()
        return [self.step(*BATCH), *self.state()]

    def least(self, tier):
        self.step.offload_to, self.step.memory_budget = tier, 1
        return self.step.plan(b=8, s=48).least_bytes

    def limit(self, tier, part=0.0):
        """Offload to a tier, with so much of the memory between the least budget and none."""
        least = self.least(tier)
        self.step.memory_budget = int(least + part * (self.unlimited.peak_bytes - least))


@pytest.fixture(scope="module")
def kept():
    return Trained()


@pytest.fixture
def trained(kept):
    yield kept
    native("fail_transfer")(-1, "error")
    native("fail_allocation")(-1)
    kept.step.memory_budget = kept.step.offload_to = None
    kept.load()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def check_timeline(plan):
    """It tells the plan's own bytes and times; transfers take turns."""
    timeline = plan.timeline
    live = timeline.live_bytes
    changing = [live[name] for name in ("activations", "gradients", "workspace") if name in live]
    assert max(map(sum, zip(*changing, strict=True))) == plan.live_peak_bytes
    assert live["offload buffer"][0] == plan.offload_buffer_bytes
    ends = [t.start_ns + t.time_ns for t in timeline.transfers]
    starts = [t.start_ns for t in timeline.transfers]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    back = sum(t.bytes for t in timeline.transfers if t.is_read)
    assert abs(back - plan.reloaded_bytes) < 64 * len(starts)
    assert any(gap.reloaded for gap in timeline.gaps)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("part", every(2, [0.15, 0.4, 0.7]))
def test_results_are_bit_identical_and_budgets_hold(trained, tmp_path, recompute, part):
    trained.limit(FileTier(tmp_path, bytes_per_s=FAST, recompute=recompute), part)
    plan = trained.step.plan(b=8, s=48)
    assert plan.fits and plan.reloaded_bytes > 0 and plan.offloaded
    assert recompute or not plan.evicted
    check_plan(trained.step.session, [8, 48], trained.step.memory_budget)
    check_timeline(plan)
    for byte in (0, 0xFF):
        trained.step.session.fill_memory(byte)
        assert same(trained.run(), trained.expected)
        report = trained.step.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes == plan.peak_bytes
        assert report.peak_bytes <= trained.step.memory_budget
        assert report.offloaded_bytes == plan.offloaded_bytes
        assert report.reloaded_bytes == plan.reloaded_bytes
        assert report.recomputations == len(plan.evicted)
    assert not list(tmp_path.iterdir())


def test_without_a_budget_nothing_is_offloaded(trained, tmp_path):
    trained.step.offload_to = tmp_path
    plan = trained.step.plan(b=8, s=48)
    assert (plan.peak_bytes, plan.time_ratio) == (trained.unlimited.peak_bytes, 1.0)
    assert same(trained.run(), trained.expected)
    assert trained.step.memory_report().offloaded_bytes == 0


def test_a_measured_folder(trained, tmp_path):
    tier = FileTier(tmp_path, recompute=False)
    figures = tier.figures()
    assert figures.write_bytes_per_s > 1e6 and figures.read_bytes_per_s > 1e6
    assert figures == tier.figures()
    trained.limit(tier, 0.5)
    assert same(trained.run(), trained.expected)


def test_a_folder_stays_the_same_where_the_process_goes(tmp_path, monkeypatch):
    (tmp_path / "fast").mkdir()
    monkeypatch.chdir(tmp_path)
    tier = FileTier("fast")
    monkeypatch.chdir("/")
    assert tier.figures().read_bytes_per_s > 0


def test_a_slow_folder_is_left_alone_where_computing_again_is_faster(trained, tmp_path):
    trained.limit(None, 0.3)
    alone = trained.step.plan(b=8, s=48)
    trained.step.offload_to = FileTier(tmp_path, bytes_per_s=1e4)
    assert trained.step.plan(b=8, s=48).evicted == alone.evicted


def test_the_refusal_of_a_budget_names_the_way_out(trained, tmp_path):
    trained.step.memory_budget = trained.unlimited.state_bytes
    with pytest.raises(MemoryBudgetError, match="offload_to"):
        trained.step(*BATCH)
    trained.step.offload_to = FileTier(tmp_path, bytes_per_s=FAST)
    with pytest.raises(MemoryBudgetError) as caught:
        trained.step(*BATCH)
    assert "offload_to" not in str(caught.value)


def test_what_cannot_be_a_tier_is_refused(trained, tmp_path):
    with pytest.raises(OffloadError, match="no folder"):
        trained.step.offload_to = tmp_path / "none"
    with pytest.raises(OffloadError, match=r"GPU.*FileTier"):
        trained.step.offload_to = "host"
    with pytest.raises(OffloadError, match="GPU"):  # before the model is exported
        relax_disc.compile(None, None, (), dynamic_shapes=(), offload_to="host")
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="no folder"):
        FileTier(tmp_path / "file")
    with pytest.raises(InputMismatchError, match="positive"):
        FileTier(tmp_path, bytes_per_s=0)
    with pytest.raises(InputMismatchError, match="pace"):
        FileTier(tmp_path, paced=True)


@pytest.mark.parametrize("way", WAYS)
def test_every_call_of_the_system_may_fail(trained, tmp_path, way):
    """The step ends in an error that says so, or right; the next one after loading is right."""
    fail = native("fail_transfer")
    trained.step.session.release()
    held = native("allocated_bytes")()
    failures = torn = 0
    trained.limit(FileTier(tmp_path, bytes_per_s=FAST, recompute=False))
    for countdown in (0, 1, 2, 3, 8, 21, 55, 89):
        # Anew, because the first calls make its file.
        trained.step.offload_to = FileTier(tmp_path, bytes_per_s=FAST, recompute=False)
        trained.load()
        before = trained.state()
        fail(countdown, way)
        try:
            assert same([trained.step(*BATCH), *trained.state()], trained.expected)
        except OffloadError as error:
            failures += 1
            assert str(tmp_path) in str(error)
            assert same(before, trained.state())
        except StepTornError as error:
            torn += 1
            assert isinstance(error.__cause__, OffloadError)
        fail(-1, way)
        assert same(trained.run(), trained.expected)
        trained.step.offload_to = None
        trained.step.session.release()
        assert native("allocated_bytes")() <= held
    assert failures + torn > 0 or way == "short"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["error", "changed"])
def test_each_call_of_the_system_may_fail(trained, tmp_path, way):
    """One after the other, until a step has fewer of them."""
    fail = native("fail_transfer")
    trained.limit(FileTier(tmp_path, bytes_per_s=FAST, recompute=False))
    failures = 0
    for countdown in range(1000):
        trained.load()
        fail(countdown, way)
        try:
            assert same([trained.step(*BATCH), *trained.state()], trained.expected)
        except (OffloadError, StepTornError):
            failures += 1
        else:
            if failures:  # the first calls, which make the file, are not all made again
                break
    fail(-1, way)
    assert failures > 20, failures
    assert same(trained.run(), trained.expected)


def test_refused_memory_for_the_transfers_changes_nothing(trained, tmp_path):
    trained.limit(FileTier(tmp_path, bytes_per_s=FAST, recompute=False))
    before = trained.state()
    for countdown in range(3):  # arena, result, the tier's buffer
        trained.step.session.release()
        native("fail_allocation")(countdown)
        with pytest.raises(OutOfMemoryError, match="nothing was changed"):
            trained.step(*BATCH)
        assert same(before, trained.state())
    assert same(trained.run(), trained.expected)


def test_a_kernel_that_fails_waits_for_transfers(trained, tmp_path):
    """The arena may go at once: nothing writes into it any more."""
    from tests.training.memory.test_faults import Trap, fail

    trap = Trap("relax_disc.cpu.attention")
    step_of_its_own = Trained()
    try:
        step_of_its_own.limit(FileTier(tmp_path, bytes_per_s=2e7, paced=True, recompute=False))
        trap.spring = fail
        with pytest.raises(RuntimeError, match="gives up"):
            step_of_its_own.step(*BATCH)
        step_of_its_own.step.session.release()
        assert same(step_of_its_own.run(), trained.expected)
    finally:
        trap.remove()


def test_steps_in_two_threads_share_a_tier(trained, tmp_path):
    other = Trained()
    tier = FileTier(tmp_path, bytes_per_s=FAST, recompute=False)
    results = {}

    def train(name, one):
        results[name] = [one.run() for _ in range(5)]

    for one in (trained, other):
        one.limit(tier)
    threads = [threading.Thread(target=train, args=pair) for pair in enumerate((trained, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for runs in results.values():
        assert all(same(run, trained.expected) for run in runs)


def test_sums_of_gradients_use_the_tier(trained, tmp_path):
    def summed():
        trained.load()
        trained.step(*BATCH, update=False)
        return [trained.step(*token_batch(8, 48, seed=1)), *trained.state()]

    expected = summed()
    tier = FileTier(tmp_path, bytes_per_s=FAST, recompute=False)
    trained.step.offload_to, trained.step.memory_budget = tier, 1
    trained.step.memory_budget = trained.step.plan(update=False, b=8, s=48).least_bytes + 2**19
    assert same(summed(), expected)
    assert trained.step.memory_report().reloaded_bytes > 0


KILLED = """
import sys
from relax_disc import FileTier
from tests.training.memory.test_offload import BATCH, Trained

trained = Trained()
trained.limit(FileTier(sys.argv[1], bytes_per_s=2e6, paced=True, recompute=False))
print("now", flush=True)
trained.step(*BATCH)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and unlinked files")
def test_nothing_is_left_of_a_process_that_was_killed(repository, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=repository, env=environment, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        while "now" not in child.stdout.readline():
            pass
        deadline = time.monotonic() + 500
        while not _writes_into(child.pid, tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _writes_into(child.pid, tmp_path)
        child.send_signal(signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def _writes_into(pid, folder):
    """Whether a process has a file of a folder open, which has no name any more."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
            if target.startswith(str(folder)) and target.endswith("(deleted)"):
                return True
        except FileNotFoundError:
            continue
    return False


FORKED = """
import gc, os, sys
from relax_disc import FileTier

tier = FileTier(sys.argv[1])
tier.figures()
child = os.fork()
if child == 0:
    del tier
    gc.collect()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), tier.figures() is not None)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks with a thread")
def test_a_fork_may_drop_a_tier_whose_thread_it_does_not_have(repository, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path)]
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["7", "True"], done.stderr


def test_leftovers_are_removed_unless_they_are_in_use(tmp_path):
    import fcntl

    (tmp_path / "relax_disc-offload-abcdef").write_bytes(b"left")
    (tmp_path / "mine").write_bytes(b"of somebody else")
    with (tmp_path / "relax_disc-offload-used00").open("wb") as used:
        fcntl.flock(used, fcntl.LOCK_EX)
        FileTier(tmp_path)
        names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["mine", "relax_disc-offload-used00"]
