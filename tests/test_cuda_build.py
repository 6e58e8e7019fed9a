"""A Llama step compiles for CUDA devices, without one; nvcc accepts the generated source."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
from torch import nn
from torch.export import Dim

from relax_disc.compiler import build
from relax_disc.frontend import capture_step
from relax_disc.tir_kernels.target import cuda_target
from tests.frontend.models import Llama, dims, token_batch


def sources(module):
    """CUDA sources of a module and of what it imports."""
    found = [module.inspect_source()] if module.kind == "cuda" else []
    for imported in module.imports:
        found += sources(imported)
    return found


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=pytest.mark.slow)])
def test_a_llama_step_compiles(arch, tmp_path):
    model = Llama()
    b, s = dims()
    captured = capture_step(
        model,
        torch.optim.AdamW(model.parameters()),
        token_batch(3, 12),
        dynamic_shapes=({0: b, 1: s}, {0: b, 1: s}),
    )
    executable = build(captured.module, cuda_target(arch))
    (source,) = sources(executable.mod)
    assert source.count("__global__") > 30
    assert "relax_disc.cuda.matmul" in executable.as_text()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed; the source was generated and its memory verified")
    (tmp_path / "step.cu").write_text(source)
    command = [nvcc, f"-arch={arch}", "-cubin", "-o", "step.cubin", "step.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_recurrent_tagger_compiles():
    rows, length = Dim("b", min=1, max=4), Dim("t", min=1, max=9)
    model = nn.LSTM(4, 6, batch_first=True)
    captured = capture_step(
        model,
        None,
        (torch.randn(3, 5, 4),),
        dynamic_shapes=({0: rows, 1: length},),
        loss_fn=lambda model, x: torch.topk(model(x)[0].cumsum(1), 2, -1)[0].square().mean(),
    )
    code = build(captured.module, cuda_target("sm_80")).as_text()
    for name in ("recurrence", "recurrence_backward", "sort"):
        assert f"relax_disc.cuda.{name}" in code
