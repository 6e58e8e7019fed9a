"""The wheel: what is in it, and that it runs where there is no compiler and no source tree."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import relax_disc
from relax_disc.vm_builtins import native
from tests.wheels import build_for_this_machine, build_wheel

QUICK_START = """
import json, logging, sys
logging.basicConfig(stream=sys.stderr, level=logging.INFO)
import torch
from torch import nn
from torch.export import Dim
import relax_disc
from relax_disc.vm_builtins import native

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)

assert native.find_compiler() is None
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = {0: Dim("rows", min=1, max=4096)}
example = torch.ones(4, 8), torch.ones(4, 1)
step = relax_disc.compile(model, optimizer, example, dynamic_shapes=(rows, rows))
losses = []
for count in (64, 7, 512, 64, 100, 300) * 5:
    x = torch.randn(count, 8)
    losses.append(step(x, x.sum(1, keepdim=True)).item())
report = step.session.report()
assert report.peak_bytes == report.planned_peak_bytes
print(json.dumps([relax_disc.__file__, losses[0], losses[-1]]))
"""

USER = """
import torch
from torch import nn
from torch.export import Dim

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)

def step():
    model, rows = Net(), {0: Dim("rows", min=1, max=4096)}
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "example_inputs": (torch.ones(4, 8), torch.ones(4, 1)),
        "dynamic_shapes": (rows, rows),
    }
"""

# Of this environment; what is installed must do without.
HIDDEN = ("CXX", "CC", "PYTHONPATH", "RELAX_DISC_LIBRARIES")

PRODUCT = """
import sys
import numpy as np, torch, tvm_ffi
tvm_ffi.load_module(sys.argv[1], keep_module_alive=True)
a, b = (np.random.default_rng(i).standard_normal((90, 90), "float32") for i in (0, 1))
c = np.empty((90, 90), "float32")
product = tvm_ffi.get_global_func("relax_disc.cpu.matmul")
product(*map(tvm_ffi.from_dlpack, (a, b)), 1, 1, 0, 0, tvm_ffi.from_dlpack(c))
np.testing.assert_allclose(c, a.astype("float64") @ b, rtol=0, atol=1e-4)
"""


def check_contents(repository, wheel, levels):
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = ["git", "ls-files", "relax_disc/vm_builtins/src"]
    tracked = subprocess.run(
        listed, cwd=repository, capture_output=True, text=True, check=True
    ).stdout.split()
    assert tracked
    assert {name for name in tracked if (repository / name).exists()} <= names
    assert {"relax_disc/py.typed", "relax_disc/report/page.html"} <= names
    assert "relax_disc/tutorials/finetune_llama.py" in names  # `relax-disc train`
    assert not any(name.startswith(("tests/", "benchmarks/", "tutorials/")) for name in names)
    libraries = {name for name in names if name.endswith(".so")}
    prefix = "relax_disc/vm_builtins/lib/relax_disc-"
    assert libraries == {f"{prefix}{level}.so" for level in levels}
    for name in libraries:
        content = zipfile.ZipFile(wheel).read(name)
        assert b"$ORIGIN/../../../torch/lib" in content
        for place in (sys.prefix, sysconfig.get_path("purelib"), str(wheel.parent)):
            assert place.encode() not in content, "a path of the machine that built it"


def check_quick_start(wheel, folder):
    """Install it in a new environment; torch and TVM are those of this one, by their folder."""
    fresh = folder / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True)
    python = fresh / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True)
    (packages,) = fresh.glob("lib/python*/site-packages")
    # A plain path: .pth files that lie there, such as that of an editable install, are not read.
    here = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
    (packages / "dependencies.pth").write_text("\n".join(dict.fromkeys(here)) + "\n")
    (folder / "quick_start.py").write_text(QUICK_START)
    kept = {k: v for k, v in os.environ.items() if k not in HIDDEN}
    cache = str(folder / "cache")
    environment = {**kept, "PATH": str(fresh / "bin"), "RELAX_DISC_CACHE": cache, "HOME": cache}
    done = subprocess.run(
        [str(python), "quick_start.py"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    file, first, last = json.loads(done.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(fresh)
    assert last < first
    assert f"the native library is {packages}/relax_disc/vm_builtins/lib/relax_disc-" in done.stderr
    check_command(fresh / "bin" / "relax-disc", folder, environment)
    return packages / "relax_disc" / "vm_builtins" / "lib"


def check_command(command, folder, environment):
    """Start the installed command, as a user would, beside a file of the user's own."""
    (folder / "mine.py").write_text(USER)

    def run(*words, code=0):
        done = subprocess.run(
            [str(command), *words],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    assert run("--version").split() == [relax_disc.__version__]
    findings = {each["name"]: each for each in json.loads(run("doctor", "--json"))}
    assert findings["C++ library"]["value"] == "of the wheel"
    assert findings["C++ compiler"] == {**findings["C++ compiler"], "value": "none", "ok": True}
    shape = ("mine.py:step", "--dim", "rows=1000", "--json")
    found = json.loads(run("report", *shape))
    assert found["shape"] == {"rows": 1000}
    assert found["fits"]
    refused = json.loads(run("report", *shape, "--budget", "10KiB", code=1))
    assert not refused["fits"]
    assert "loss" in run("train", "--smoke", "--steps", "3")


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="wheels are for x86-64"
)


@pytest.mark.slow
def test_wheel_of_one_instruction_set_trains_without_a_compiler(repository, tmp_path):
    """What continuous integration runs, on the wheel whose library the other tests run on."""
    built = os.environ.get("RELAX_DISC_WHEEL")
    folder = Path(built) if built else tmp_path
    wheel = next(folder.glob("*.whl")) if built else build_for_this_machine(tmp_path)
    check_contents(repository, wheel, native.levels(native.processor_flags())[:1])
    check_quick_start(wheel, tmp_path)


@pytest.mark.slow
def test_wheel_trains_without_a_compiler_and_every_library_multiplies(repository, tmp_path):
    wheel = build_wheel(repository, tmp_path)
    check_contents(repository, wheel, ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
    libraries = check_quick_start(wheel, tmp_path)
    best = native.carried(libraries, native.processor_flags())
    assert best is not None
    for library in sorted(libraries.iterdir()):
        if library.name <= best.name:
            subprocess.run([sys.executable, "-c", PRODUCT, str(library)], check=True)
