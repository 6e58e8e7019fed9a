"""The cache of compiled programs: reuse, damage, bounds, keys, and processes at once."""

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim
from tvm.support import cc

import relax_disc
from relax_disc import compiler
from relax_disc.errors import ArtefactError
from relax_disc.frontend import capture_step
from relax_disc.frontend.capture import step as frontend_capture
from relax_disc.pipeline import PipelineOptions
from relax_disc.tir_kernels.target import cpu_target
from relax_disc.training.cache import artefact
from relax_disc.training.cache.compile_cache import build_cached, program_key
from relax_disc.vm_builtins import native


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(6, width)

    def forward(self, x):
        return self.linear(x).square().mean()


SHAPES = ({0: Dim("rows", min=1, max=64)},)


def make(width=4):
    torch.manual_seed(0)
    model = Net(width)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def compile_net():
    model, optimizer = make()
    return relax_disc.compile(model, optimizer, (torch.ones(3, 6),), dynamic_shapes=SHAPES)


@pytest.fixture
def builds(monkeypatch):
    """How often something was compiled."""
    count = []
    original = compiler.build
    monkeypatch.setattr(compiler, "build", lambda *a: count.append(1) or original(*a))
    return count


def test_second_start_does_not_compile(folder, builds):
    first = compile_net()
    assert len(builds) == 1
    second = compile_net()
    assert len(builds) == 1
    x = torch.randn(5, 6)
    assert torch.equal(first(x), second(x))
    assert sorted(path.suffix for path in folder.iterdir()) == [".capture", ".program"]


def test_a_damaged_program_is_compiled_again(folder, builds, caplog):
    compile_net()
    (path,) = folder.glob("*.program")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert torch.isfinite(compile_net()(torch.ones(2, 6)))
    assert len(builds) == 2
    assert "damaged" in caplog.text
    compile_net()
    assert len(builds) == 2


def test_can_be_switched_off(folder, builds, monkeypatch):
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    compile_net()
    assert not folder.exists()


def test_a_disk_that_refuses_does_not_stop_training(tmp_path, monkeypatch, caplog):
    native.load()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RELAX_DISC_CACHE", str(tmp_path / "file"))
    assert torch.isfinite(compile_net()(torch.ones(2, 6)))
    assert "not kept" in caplog.text


def test_without_a_linker_there_is_training_but_nothing_to_keep(
    folder, monkeypatch, caplog, tmp_path
):
    monkeypatch.setattr(cc, "get_cc", lambda: None)
    step = compile_net()
    assert torch.isfinite(step(torch.ones(2, 6)))
    assert "not kept" in caplog.text and not folder.exists()
    with pytest.raises(ArtefactError, match="no C\\+\\+ compiler"):
        step.save(tmp_path / "step")
    assert not (tmp_path / "step").exists()


def test_without_room_to_link_there_is_training_but_nothing_to_keep(folder, monkeypatch, caplog):
    """LLVM ends the process when a disk is full."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=2**20))
    assert torch.isfinite(compile_net()(torch.ones(2, 6)))
    assert "has 1.00 MiB left" in caplog.text and "TMPDIR" in caplog.text and not folder.exists()


class Fake:
    """An executable whose library is ten bytes."""

    def export_library(self, path):
        Path(path).write_bytes(b"0123456789")


def capture(width=4, rows=64):
    model, optimizer = make(width)
    shapes = ({0: Dim("rows", min=1, max=rows)},)
    return capture_step(model, optimizer, (torch.ones(3, 6),), dynamic_shapes=shapes).module


def test_is_bounded_by_the_least_recently_used(folder, monkeypatch):
    monkeypatch.setattr(artefact, "load_library", lambda content: content)
    module, target = capture(), cpu_target()
    names = []
    variants = [
        PipelineOptions(),
        *(PipelineOptions(**{k: False}) for k in ("fuse", "schedule_ops")),
    ]
    for age, options in enumerate(variants):
        if age == 2:
            size = sum(path.stat().st_size for path in folder.iterdir())
            monkeypatch.setenv("RELAX_DISC_CACHE_BYTES", str(size))
            (folder / ".killed.program.x").write_bytes(b"half of a progr")
            (folder / ".busy.program.y").write_bytes(b"half of a progr")
            os.utime(folder / ".killed.program.x", (0, 0))
        built = build_cached(module, target, options, Fake)
        if age == 0:
            built.calibration_path("this machine").write_bytes(b"goes with its program")
        names.append(f"{program_key(module, target, options)}.program")
        os.utime(folder / names[-1], (age, age))
    assert {path.name for path in folder.iterdir()} == {*names[1:], ".busy.program.y"}


def test_keys_tell_programs_apart():
    target, options = cpu_target(), PipelineOptions()
    key = program_key(capture(), target, options)
    assert key == program_key(capture(), target, None)
    others = [
        program_key(capture(width=5), target, options),
        program_key(capture(rows=65), target, options),
        program_key(capture(), tvm.target.Target("llvm"), options),
        program_key(capture(), target, PipelineOptions(fuse=False)),
    ]
    assert len({key, *others}) == 5


def train_together(meeting):
    """Compile while another process does, and write the program when that one is about to."""
    write = artefact.write

    def write_together(*arguments):
        Path(meeting, str(os.getpid())).touch()
        end = time.monotonic() + 500
        while len(list(Path(meeting).iterdir())) < 2:
            assert time.monotonic() < end, "the other process does not write"
            time.sleep(0.001)
        write(*arguments)

    artefact.write = write_together
    train()


def train_from_cache():
    compiler.build = frontend_capture.trace_step = None
    train()


def train():
    """Print the loss and the weights of a step."""
    step = compile_net()
    loss = step(torch.ones(5, 6)).item()
    print(json.dumps([loss, step.model.linear.weight.tolist()]))


def start(call, cache):
    """Start a process that calls a function of this file; its cache has the native library."""
    for path in native.cache_directory().glob("relax_disc-*.so"):
        if not (cache / path.name).exists():
            (cache / path.name).symlink_to(path)
    environment = {**os.environ, "RELAX_DISC_CACHE": str(cache)}
    environment.pop("RELAX_DISC_COMPILE_CACHE", None)
    script = f"from tests.training.state import test_compile_cache\ntest_compile_cache.{call}"
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def printed(process):
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return json.loads(text.splitlines()[-1])


def test_two_processes_compile_at_once_and_a_third_uses_what_they_left(tmp_path):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    both = [start(f"train_together({str(meeting)!r})", tmp_path) for _ in range(2)]
    results = [printed(process) for process in both]
    model, optimizer = make()
    loss = model(torch.ones(5, 6))
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(torch.tensor(results[0][0]), loss.detach())
    torch.testing.assert_close(torch.tensor(results[0][1]), model.linear.weight.detach())
    left = sorted(path.suffix for path in (tmp_path / "programs").iterdir())
    assert left == [".capture", ".program"]
    assert results[0] == results[1] == printed(start("train_from_cache()", tmp_path))


def test_a_dump_is_written_whatever_the_cache_holds(folder, tmp_path):
    module, target = capture(), cpu_target()
    options = PipelineOptions(dump_to=tmp_path / "dumps")
    assert program_key(module, target, options) == program_key(module, target, None)
    assert compiler.build_or_reuse(module, target).path is not None
    assert compiler.build_or_reuse(module, target, options).path is None
    assert len(list((tmp_path / "dumps").iterdir())) == 6
