"""The optimizer's state in a folder: same bits, little in memory, failures of the disk seen."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import tvm_ffi
from torch.export import Dim

import relax_disc
from relax_disc.errors import InputMismatchError, MemoryBudgetError, OffloadError, StepTornError

PAGE = 4096
SIZES = (4, 1, 64, 7)


def native(name):
    relax_disc.vm_builtins.runtime.load()
    return tvm_ffi.get_global_func(f"relax_disc.{name}")


def batch(size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 64, generator=generator)
    return x, torch.randint(0, 300, (size,), generator=generator)


def loss(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)


class Trained:
    def __init__(self, optimizer=None, **options):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 384), torch.nn.GELU(), torch.nn.Linear(384, 384)]
        self.model = torch.nn.Sequential(*layers, torch.nn.GELU(), torch.nn.Linear(384, 300))
        make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        self.optimizer = make(self.model.parameters())
        axes = {0: Dim("b", min=1, max=64)}
        self.step = relax_disc.compile(
            *(self.model, self.optimizer, batch(5)),
            dynamic_shapes=(axes, axes), loss_fn=loss, **options,
        )  # fmt: skip

    def tensors(self):
        found = [p.detach().clone() for p in self.model.parameters()]
        for state in self.optimizer.state.values():
            found += [x.clone() for x in state.values() if isinstance(x, torch.Tensor)]
        return found

    def large_state(self):
        return [
            x
            for state in self.optimizer.state.values()
            for x in state.values()
            if isinstance(x, torch.Tensor) and x.numel() * x.element_size() >= 1 << 16
        ]


@pytest.fixture(autouse=True)
def sound_disk():
    gc.collect()  # the files of earlier tests go with their steps
    yield
    native("fail_transfer")(-1, "error")


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.tensors(), second.tensors(), strict=True))


def in_memory(process="self"):
    """Bytes of a process's pages that belong to files of offload folders.

    The system gives them some mappings at a time: they are of one moment if the process waits.
    """
    total, ours = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "relax_disc-offload" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def runs(task):
    """Whether a thread, a folder of /proc, has been stopped neither by a signal nor for good."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0] not in "TXZ"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def stopped(process):
    """All threads of `process` wait."""
    os.kill(process, signal.SIGSTOP)
    try:
        while any(map(runs, Path(f"/proc/{process}/task").iterdir())):
            time.sleep(0.0001)
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def watch(process, connection):
    """Send what `in_memory` counts of `process` from now until something arrives."""
    seen = []
    connection.send("watching")
    while not connection.poll(0.0005):
        with stopped(process):
            seen.append(in_memory(process))
    connection.send(seen)


OPTIMIZERS = {
    "AdamW": None,
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad that does not begin at zero": lambda p: torch.optim.Adagrad(
        p, lr=0.1, initial_accumulator_value=0.5
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_results_are_bit_identical_and_the_peak_is_as_planned(tmp_path, optimizer):
    plain = Trained(OPTIMIZERS[optimizer])
    kept = Trained(OPTIMIZERS[optimizer], offload_to=tmp_path, offload="optimizer")
    for size in SIZES:
        assert torch.equal(plain.step(*batch(size)), kept.step(*batch(size)))
        assert in_memory() == 0
        plan, report = kept.step.plan(b=size), kept.step.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes == plan.peak_bytes
        assert report.state_window_bytes == plan.state_window_bytes > 0
        large = sum(x.numel() * x.element_size() for x in kept.large_state())
        assert report.offloaded_state_bytes == plan.offloaded_state_bytes == large
        saved = plain.step.plan(b=size).peak_bytes - plan.peak_bytes
        assert saved == large - plan.state_window_bytes
        assert sum(plan.timeline.live_bytes["optimizer state"][:1]) == (
            sum(plain.step.plan(b=size).timeline.live_bytes["optimizer state"][:1]) - saved
        )
    assert same(plain, kept)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_no_more_than_one_kernels_state_is_in_memory(tmp_path):
    """Counted by the system, while the step runs, at moments at which it is stopped."""
    kept = Trained(offload_to=tmp_path, offload="optimizer")
    kept.step(*batch(64))
    ours, its = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("fork").Process(target=watch, args=(os.getpid(), its))
    watcher.start()
    assert ours.recv() == "watching"
    for _ in range(20):
        kept.step(*batch(64))
    ours.send("enough")
    seen = ours.recv()
    watcher.join()
    window = kept.step.plan(b=64).state_window_bytes
    largest = 384 * 384 * 4 * 2  # both moments of the middle layer's weight
    assert window == largest
    assert 0 < max(seen) <= window


def test_state_can_be_saved_loaded_and_read(tmp_path):
    plain, kept = Trained(), Trained(offload_to=tmp_path, offload="optimizer")
    for trained in (plain, kept):
        trained.step(*batch(4))
    saved = tmp_path / "optimizer.pt"
    torch.save(kept.optimizer.state_dict(), saved)
    there = {id(p): dict(state) for p, state in kept.optimizer.state.items()}
    before = [x.clone() for x in kept.large_state()]
    old = kept.large_state()
    kept.step(*batch(7))
    moved = [x.clone() for x in kept.large_state()]
    kept.optimizer.load_state_dict(torch.load(saved))
    assert all(not torch.equal(a, b) for a, b in zip(old, before, strict=True))
    with torch.no_grad():
        for p, q in zip(kept.model.parameters(), plain.model.parameters(), strict=True):
            p.copy_(q)
    assert torch.equal(kept.step(*batch(1)), plain.step(*batch(1)))
    assert same(plain, kept)
    # What the user holds of the state that was replaced is not written any more.
    assert all(torch.equal(a, b) for a, b in zip(old, moved, strict=True))
    del there, old
    again = Trained(offload_to=tmp_path, offload="optimizer")
    again.optimizer.load_state_dict(copy.deepcopy(kept.optimizer.state_dict()))
    with torch.no_grad():
        for p, q in zip(again.model.parameters(), plain.model.parameters(), strict=True):
            p.copy_(q)
    again.step(*batch(64)), plain.step(*batch(64))
    assert same(plain, again)


def test_state_of_channels_last_parameters(tmp_path):
    """Its axes are put in order, as without a file."""
    found = []
    for options in ({}, {"offload_to": tmp_path, "offload": "optimizer"}):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(32, 64, 3, padding=1).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.randn(2, 32, 6, 6)
        step = relax_disc.compile(
            *(model, optimizer, (x,)),
            dynamic_shapes=({0: Dim("b", min=1, max=8)},),
            loss_fn=lambda model, x: model(x).square().mean(),
            **options,
        )
        step(x)
        state = optimizer.state[model.weight]  # as a checkpoint of eager PyTorch has it
        state["exp_avg"] = state["exp_avg"].to(memory_format=torch.channels_last)
        assert not state["exp_avg"].is_contiguous()
        step(x)
        loss = step(x)
        found.append([loss, *(p.detach().clone() for p in model.parameters())])
        assert bool(options) == (step.memory_report().offloaded_state_bytes > 0)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_sums_of_gradients_and_clipping(tmp_path):
    plain = Trained(max_grad_norm=0.5)
    kept = Trained(max_grad_norm=0.5, offload_to=tmp_path, offload="optimizer")
    for trained in (plain, kept):
        trained.step(*batch(4), update=False)
        trained.step(*batch(1))
        trained.step(*batch(7))
    assert in_memory() == 0
    assert same(plain, kept)
    report = kept.step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes


def test_both_are_offloaded_under_a_budget(tmp_path):
    plain = Trained()
    tier = relax_disc.FileTier(tmp_path, bytes_per_s=4e10)
    kept = Trained(offload_to=tier, offload=("activations", "optimizer"))
    plan = kept.step.plan(b=64)
    kept.step.memory_budget = plan.least_bytes
    with pytest.raises(MemoryBudgetError):
        plain.step.memory_budget = plan.least_bytes
        plain.step(*batch(64))
    plain.step.memory_budget = None
    for _ in range(3):
        assert torch.equal(plain.step(*batch(64)), kept.step(*batch(64)))
        report = kept.step.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes <= plan.least_bytes
    assert same(plain, kept)


def test_it_can_be_changed_between_calls(tmp_path):
    plain, kept = Trained(), Trained()
    (tmp_path / "other").mkdir()
    for change in (
        {},
        {"offload_to": tmp_path, "offload": "optimizer"},
        {"offload_to": tmp_path / "other"},
        {"offload": "activations"},
        {"offload": ["optimizer"]},
        {"offload_to": None},
    ):
        for name, value in change.items():
            setattr(kept.step, name, value)
        plain.step(*batch(4)), kept.step(*batch(4))
        is_offloaded = kept.step.plan(b=4).offloaded_state_bytes > 0
        assert is_offloaded == (
            kept.step.offload_to is not None and "optimizer" in kept.step.offload
        )
    assert in_memory() == 0
    assert same(plain, kept)


@pytest.mark.parametrize("way", ["error", "full"])
def test_each_call_of_the_system_may_fail(tmp_path, way):
    """No wrong result: a refusal that changed nothing, or a step that says that it is torn."""
    fail = native("fail_transfer")
    plain = Trained()
    kept = Trained(offload_to=tmp_path, offload="optimizer")
    plain.step(*batch(4)), kept.step(*batch(4))
    start = copy.deepcopy((kept.model.state_dict(), kept.optimizer.state_dict()))
    plain.step(*batch(7))
    outcomes = set()
    for countdown in range(100):
        before = kept.tensors()
        fail(countdown, way)
        try:
            kept.step(*batch(7))
        except StepTornError as error:
            assert str(tmp_path) in str(error)
            outcomes.add("torn")
            fail(-1, way)
        except OffloadError as error:
            assert str(tmp_path) in str(error)
            assert all(torch.equal(a, b) for a, b in zip(before, kept.tensors(), strict=True))
            outcomes.add("refused")
            fail(-1, way)
        else:
            fail(-1, way)
            assert same(plain, kept)
            break
        kept.model.load_state_dict(start[0])
        kept.optimizer.load_state_dict(copy.deepcopy(start[1]))
    else:
        raise AssertionError("it never succeeded")
    assert outcomes == {"torn", "refused"}
    plain.step(*batch(64)), kept.step(*batch(64))
    assert in_memory() == 0
    assert same(plain, kept)


def change_file(folder, tensor):
    """Flip a bit of a tensor on the disk, as another process can that finds the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        borders, _, offset, _, node, *_ = line.split()
        first, last = (int(border, 16) for border in borders.split("-"))
        if first <= tensor.data_ptr() < last:
            break
    place = int(offset, 16) + tensor.data_ptr() - first
    for link in Path("/proc/self/fd").iterdir():
        if str(folder) in os.path.realpath(link) and link.stat().st_ino == int(node):
            with link.open("r+b", buffering=0) as file:
                [before] = os.pread(file.fileno(), 1, place)
                os.pwrite(file.fileno(), bytes([before ^ 1]), place)


def test_a_file_that_was_changed_underneath_is_noticed(tmp_path):
    plain, kept = Trained(), Trained(offload_to=tmp_path, offload="optimizer")
    plain.step(*batch(4)), kept.step(*batch(4))
    saved = copy.deepcopy((kept.model.state_dict(), kept.optimizer.state_dict()))
    kept.step(*batch(4))
    for tensor in range(len(kept.large_state())):
        kept.model.load_state_dict(saved[0])
        kept.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        kept.step(*batch(7))
        change_file(tmp_path, kept.large_state()[tensor])
        with pytest.raises((OffloadError, StepTornError), match="not what was written"):
            kept.step(*batch(1))
        if tensor == 0:  # it stays so until the state is loaded, whoever reads it
            kept.tensors()
            with pytest.raises((OffloadError, StepTornError)):
                kept.step(*batch(1))
    kept.model.load_state_dict(saved[0])
    kept.optimizer.load_state_dict(copy.deepcopy(saved[1]))
    plain.step(*batch(64)), kept.step(*batch(64))
    assert same(plain, kept)


WRITERS = {
    "in place": lambda x: x.mul_(0.5),
    "behind autograd": lambda x: x.data.mul_(0.5),
    "by NumPy": lambda x: x.numpy().__imul__(0.5),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_state_may_be_written_between_steps(tmp_path, writer):
    """What this process wrote is not compared with what it was."""
    plain, kept = Trained(), Trained(offload_to=tmp_path, offload="optimizer")
    for size in (4, 7, 1):
        assert torch.equal(plain.step(*batch(size)), kept.step(*batch(size)))
        for trained in (plain, kept):
            for tensor in trained.large_state():
                WRITERS[writer](tensor)
    assert same(plain, kept)


def test_a_disk_that_gives_other_bytes_is_noticed(tmp_path):
    """At the step, or where bytes were changed as they were written, at the next one."""
    fail = native("fail_transfer")
    plain, kept = Trained(), Trained(offload_to=tmp_path, offload="optimizer")
    plain.step(*batch(4)), kept.step(*batch(4))
    start = copy.deepcopy((kept.model.state_dict(), kept.optimizer.state_dict()))
    plain.step(*batch(7)), plain.step(*batch(1))
    failures = 0
    for countdown in range(100):
        kept.model.load_state_dict(start[0])
        kept.optimizer.load_state_dict(copy.deepcopy(start[1]))
        fail(countdown, "changed")
        try:
            kept.step(*batch(7)), kept.step(*batch(1))
        except (OffloadError, StepTornError):
            failures += 1
        else:
            if failures and same(plain, kept):
                break
        finally:
            fail(-1, "error")
    # Two steps bring six tensors each and put them away; loading moves six. The last one put away
    # has not been read again.
    assert failures >= 24


def test_what_cannot_be_offloaded_is_refused(tmp_path):
    with pytest.raises(InputMismatchError, match="needs offload_to"):
        Trained(offload="optimizer")
    with pytest.raises(InputMismatchError, match="'gradients'"):
        Trained(offload_to=tmp_path, offload=("optimizer", "gradients"))
    with pytest.raises(OffloadError, match="no folder"):
        Trained(offload_to=tmp_path / "missing", offload="optimizer")
    model = torch.nn.Linear(64, 300)
    with pytest.raises(InputMismatchError, match="without an optimizer"):
        relax_disc.compile(
            *(model, None, batch(2)), dynamic_shapes=({}, {}), loss_fn=loss,
            offload_to=tmp_path, offload="optimizer",
        )  # fmt: skip


def test_a_child_process_does_not_have_the_state(tmp_path):
    """It would write into its parent's; workers of a DataLoader do not touch it."""
    kept = Trained(offload_to=tmp_path, offload="optimizer")
    kept.step(*batch(4))
    before = kept.tensors()
    child = os.fork()
    if child == 0:
        kept.large_state()[0].zero_()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert all(torch.equal(a, b) for a, b in zip(before, kept.tensors(), strict=True))
    kept.step(*batch(4))
