"""The cache of compiled programs: reuse, damage, bounds, and what a key depends on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc import compiler
from relax_disc.frontend import capture_step
from relax_disc.pipeline import PipelineOptions
from relax_disc.tir_kernels.target import cpu_target
from relax_disc.training.compile_cache import build_cached, program_key
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
def folder(tmp_path, monkeypatch):
    """An empty cache of programs that keeps the native library of the real one."""
    native.load()
    monkeypatch.setenv("RELAX_DISC_CACHE", str(tmp_path))
    monkeypatch.delenv("RELAX_DISC_COMPILE_CACHE", raising=False)
    return tmp_path / "programs"


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
    assert len(list(folder.iterdir())) == 1


def test_a_damaged_program_is_compiled_again(folder, builds, caplog):
    compile_net()
    (path,) = folder.iterdir()
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


class Fake:
    """An executable whose library is ten bytes."""

    def export_library(self, path):
        Path(path).write_bytes(b"0123456789")


def capture(width=4, rows=64):
    model, optimizer = make(width)
    shapes = ({0: Dim("rows", min=1, max=rows)},)
    return capture_step(model, optimizer, (torch.ones(3, 6),), dynamic_shapes=shapes).module


def test_is_bounded_by_the_least_recently_used(folder, monkeypatch):
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
        built = build_cached(module, target, options, Fake)
        if age == 0:
            built.calibration_path("this machine").write_bytes(b"goes with its program")
        names.append(f"{program_key(module, target, options)}.program")
        os.utime(folder / names[-1], (age, age))
    assert {path.name for path in folder.iterdir()} == set(names[1:])


def test_keys_tell_programs_apart_and_survive_the_process():
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
    script = (
        "from tests.training.test_compile_cache import capture, program_key, cpu_target\n"
        "print(program_key(capture(), cpu_target(), None))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.split()[-1] == key


_WITHOUT_COMPILER = """
import torch
import relax_disc
from torch.export import Dim
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
step = relax_disc.compile(
    model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(3, 6),),
    dynamic_shapes=({0: Dim("rows", min=1, max=64)},), loss_fn=lambda m, x: m(x).square().mean(),
)
print(step(torch.ones(5, 6)).item())
"""


def test_a_second_start_without_the_native_library(tmp_path):
    environment = {**os.environ, "RELAX_DISC_CACHE": str(tmp_path), "RELAX_DISC_NATIVE": "0"}
    environment.pop("RELAX_DISC_COMPILE_CACHE", None)
    losses = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _WITHOUT_COMPILER],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env=environment,
        ).stdout
        for _ in range(2)
    ]
    assert losses[0] == losses[1] and float(losses[0]) > 0
    assert len(list((tmp_path / "programs").glob("*"))) == 1
