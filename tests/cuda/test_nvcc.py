"""NVIDIA's compiler takes what the emulator runs: no spills, within each architecture's limits."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch
from torch.export import Dim

from relax_disc.compiler import build
from relax_disc.frontend import capture_step
from relax_disc.tir_kernels.target import cuda_target
from tests.cuda.test_raw_loops import Scattering, batch_of, settings
from tests.cuda.test_steps import Network, images
from tests.frontend.models import Llama, dims, token_batch
from tests.test_cuda_build import sources

ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
_SHARED_BYTES = 48 << 10  # of a block, without asking the driver for more


def captured_llama():
    model, (b, s) = Llama(), dims()
    shape = {0: b, 1: s}
    optimizer = torch.optim.AdamW(model.parameters())
    return capture_step(model, optimizer, token_batch(3, 12), dynamic_shapes=(shape, shape))


def captured_network():
    model = Network()
    rows = Dim("rows", min=1, max=64)
    high, wide = (Dim(name, min=8, max=64) for name in ("high", "wide"))
    return capture_step(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        images(3, 9),
        dynamic_shapes=({0: rows, 2: high, 3: wide}, {0: rows}),
    )


def captured_scattering():
    model = Scattering()
    return capture_step(model, torch.optim.SGD(model.parameters()), **settings(batch_of(3, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("capture", [captured_llama, captured_network, captured_scattering])
def test_nvcc_compiles_every_kernel_without_spills(capture, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    executable = build(capture().module, cuda_target("sm_80"))
    (source,) = sources(executable.mod)
    (tmp_path / "step.cu").write_text(source)
    for arch in ARCHITECTURES:
        command = [nvcc, f"-arch={arch}", "-cubin", "-Xptxas", "-v", "-o", "step.cubin", "step.cu"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        kernels = re.findall(r'^extern "C" __global__ .*\) \{$', source, re.MULTILINE)
        assert len(re.findall("Compiling entry", done.stderr)) == len(kernels)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)]
        assert spilled
        assert max(spilled) == 0, done.stderr
        shared = [int(n) for n in re.findall(r"(\d+) bytes smem", done.stderr)]
        assert max(shared, default=0) <= _SHARED_BYTES
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)]
        threads = [int(n) for n in re.findall(r"__launch_bounds__\((\d+)\)", source)]
        assert max(threads) * max(registers) <= 65536
