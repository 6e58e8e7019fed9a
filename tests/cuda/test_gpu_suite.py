"""The suite for a GPU, rehearsed: on the host, and for CUDA on the emulator."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch

from benchmarks import record
from benchmarks.gpu import device as devices
from benchmarks.gpu import parts, suite
from benchmarks.gpu.attention import attention_errors
from benchmarks.gpu.device import Device
from benchmarks.gpu.llama import batch_of, make_model, way_of_training
from benchmarks.gpu.rows import LOST, Rows
from relax_disc.tir_kernels.target import cuda_target
from tests.cuda import attention_kernels
from tests.cuda.emulator import Emulator
from tests.cuda.stand_in import Recorder, cuda_stand_in
from tests.cuda.streams import Streams
from tests.tiers import slow

ROWS = {
    "smoke": {"versions", "layer", "attention", "llama", "graphs"},
    "numbers": {"llama", "llama, bf16 autocast", parts.ENTRIES[0].name},
    "paper": {
        f"batch 2, {kind}, {way}"
        for kind in ("float32", "bf16 autocast")
        for way in ("relax_disc", "eager", "checkpoint")
    },
    "bandwidth": {"copy", "kernels"},
    "budgets": {"1.0", "0.75", "0.5", "0.4", "0.5, offloaded", "0.4, offloaded"},
    "sanitizer": {"memcheck", "racecheck"},
}


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "RESULTS", tmp_path)

    def read(device, part):
        found = json.loads((tmp_path / f"gpu_{device}_{part}.json").read_text())
        return {row["row"]: row for row in found["results"]}

    return read


def run(part):
    device = devices.host()
    suite.run_part(part, Rows(device, part), device, rehearse=True)


def check_llama(lengths):
    for row in lengths:
        assert row["gradient_error"] <= 2 * row["torch_gradient_error"] + 1e-6
        assert row["loss_error"] <= 2 * row["torch_loss_error"] + 1e-5


def check_attention(calls):
    bounds = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
    assert len(calls) == 18
    for row in calls:
        assert max(row["errors"].values()) < bounds[row["dtype"]], row


@pytest.mark.parametrize(
    "part",
    [
        *("smoke", "bandwidth"),
        *map(slow, ("budgets", "sanitizer", "numbers", "paper")),
    ],
)
def test_a_part_runs_and_goes_on_where_it_ended(results, monkeypatch, part):
    run(part)
    found = results("rehearsal", part)
    assert set(found) == ROWS[part]
    assert not any("failed" in row for row in found.values()), found
    if part == "smoke":
        check_llama(found["llama"]["lengths"])
        check_attention(found["attention"]["calls"])
        assert found["graphs"]["plain"]["losses"] == found["graphs"]["graphs"]["losses"]
        assert found["layer"]["ours"] == pytest.approx(found["layer"]["loss"], rel=1e-5)
    if part == "numbers":
        check_llama(found["llama"]["lengths"])
        assert found[parts.ENTRIES[0].name]["verdict"] == "trains"
    if part == "budgets":
        assert len({row["loss"] for row in found.values()}) == 1
        assert found["0.5"]["planned_peak_bytes"] <= found["0.5"]["budget_bytes"]

    def measured_again(*args, **kwargs):
        raise AssertionError("it was there already")

    monkeypatch.setattr(Rows, "add", measured_again)
    run(part)


def test_attention_is_checked_by_the_kernels_of_a_gpu():
    attention_kernels.calls.clear()
    with attention_kernels.attention_kernels():
        calls = attention_errors(Device("stand-in", "cpu", None))
    check_attention(calls)
    chosen = {(row["dtype"], row["form"]): row["kernel"] for row in calls}
    assert chosen["bfloat16", "packed causal"] == chosen["float16", "plain"] == "flash"
    assert chosen["float32", "packed"] == chosen["bfloat16", "masked"] == "efficient"
    assert {"flash packed backward", "efficient packed"} <= set(attention_kernels.calls)


def test_rows_of_another_commit_are_measured_again(results, monkeypatch):
    device = Device("old", "cpu", "llvm")
    Rows(device, "smoke").add("versions", torch="1")
    assert not Rows(device, "smoke").wanted("versions")
    monkeypatch.setattr(record, "commit", lambda: "another")
    assert Rows(device, "smoke").wanted("versions")
    assert not Rows(device, "smoke", seconds=-1).wanted("versions")


def test_what_fails_is_a_row(results, tmp_path):
    def out_of_memory():
        raise torch.OutOfMemoryError("no memory")

    device, copies = Device("old", "cpu", "llvm"), tmp_path / "copies"
    copies.mkdir()
    Rows(device, "paper", copy_to=copies).measure("eager", out_of_memory)
    assert results("old", "paper")["eager"]["failed"] == "OutOfMemoryError: no memory"
    assert (copies / "gpu_old_paper.json").is_file()
    assert not Rows(device, "paper").wanted("eager")
    assert Rows(device, "paper", retry=True).wanted("eager")


def test_a_row_that_ends_its_process_is_begun_twice(results):
    def ends():
        raise KeyboardInterrupt  # as a fault of the process, no row can catch it

    device = Device("old", "cpu", "llvm")
    for _ in range(2):
        assert Rows(device, "paper").wanted("graphs")
        with pytest.raises(KeyboardInterrupt):
            Rows(device, "paper").measure("graphs", ends)
    assert not Rows(device, "paper").wanted("graphs")
    assert results("old", "paper")["graphs"]["begun"] == 2


def test_a_lost_device_ends_the_process(results, monkeypatch):
    def fault():
        raise RuntimeError("an illegal memory access was encountered")

    device = Device("old", "cpu", "llvm")
    monkeypatch.setattr(Device, "wait", lambda self: fault())
    with pytest.raises(SystemExit) as ended:
        Rows(device, "paper").measure("relax_disc", fault)
    assert ended.value.code == LOST
    assert "illegal" in results("old", "paper")["relax_disc"]["failed"]


def test_a_part_goes_on_in_another_process(monkeypatch):
    codes = [LOST, -11, 0]
    commands = []

    def run(command, timeout, check):
        commands.append(command)
        return subprocess.CompletedProcess(command, codes[len(commands) - 1])

    monkeypatch.setattr(suite.subprocess, "run", run)
    assert suite._ended("paper", ["--rehearse"], 100.0) == 0
    assert [command[3:5] for command in commands] == [["--parts", "paper"]] * 3


def test_ways_of_compiling_do_not_share_code(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    counts = torch._dynamo.utils.counters["stats"]
    for way in ("compile", "compile:0.3"):
        model = make_model(parts.TINY, devices.host())
        optimizer = torch.optim.SGD(model.parameters())
        counts.clear()
        step = way_of_training(way, model, optimizer, devices.host(), autocast=False)
        step(*batch_of([3, 2], devices.host(), parts.TINY))
        assert counts["unique_graphs"] == 1


def test_wheels_are_packed_and_whole_again(repository, tmp_path):
    wheel = tmp_path / "thing-1-py3-none-any.whl"
    contents = {"thing/__init__.py": b"x = 1\n" * 4000, "thing/more.py": b"x = 1\n" * 3999}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
    for options in ([], ["--unpack"]):
        script = str(repository / "scripts" / "pack_wheels.py")
        subprocess.run([sys.executable, script, *options, str(tmp_path)], check=True)
        assert (wheel.exists(), wheel.with_name(wheel.name + ".xz").exists()) == (
            bool(options),
            True,
        )
    with zipfile.ZipFile(wheel) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == contents


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_parts_run_for_cuda(results, monkeypatch):
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    device = Device("stand-in", "cpu", cuda_target("sm_90"))
    emulator = Emulator.load()
    emulator.take_findings()
    recorder = Recorder(emulator)
    with cuda_stand_in(emulator), recorder.running():
        graphs = parts.compare_graphs(device, parts.TINY)
    assert graphs["plain"]["losses"] == graphs["graphs"]["losses"]
    assert len(recorder.graphs) == 2
    with cuda_stand_in(emulator), Streams(emulator, "copies").running():
        parts.smoke(device, Rows(device, "smoke"))
        parts.bandwidth(device, Rows(device, "bandwidth"), parts.TINY, records=1)
        parts.budgets(device, Rows(device, "budgets"), parts.TINY, records=1)
    emulator.memory = None
    findings = emulator.take_findings()
    assert not findings, "\n".join(map(str, findings))
    check_llama(results("stand-in", "smoke")["llama"]["lengths"])
    budgets = results("stand-in", "budgets")
    assert set(budgets) == ROWS["budgets"]
    assert len({row["loss"] for row in budgets.values()}) == 1
