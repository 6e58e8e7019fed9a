"""A Llama step compiles for CUDA devices, without one; nvcc accepts the generated source."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
import tvm_ffi
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.compiler import build
from relax_disc.errors import ArtefactError
from relax_disc.frontend import capture_step
from relax_disc.memory_analysis import analyze_memory, largest
from relax_disc.tir_kernels.target import cuda_target
from relax_disc.vm_builtins.plan_metadata import PlanMetadata
from relax_disc.vm_builtins.session import Session
from tests.frontend.models import Llama, dims, token_batch
from tests.placement import check_plan


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
    for name in ("cuda.recurrence", "cuda.recurrence_backward", "aten.call"):
        assert f"relax_disc.{name}" in code


def test_what_is_analysed_is_what_the_program_will_plan(monkeypatch):
    """In a GPU's memory everything begins at multiples of 256 bytes, not of the CPU's 64."""
    rows = Dim("rows", min=1, max=64)
    captured = capture_step(
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
        None,
        (torch.randn(3, 5),),
        dynamic_shapes=({0: rows},),
        loss_fn=lambda model, x: model(x).square().mean(),
    )
    target = cuda_target("sm_80")
    written = []
    to_json = PlanMetadata.to_json
    monkeypatch.setattr(PlanMetadata, "to_json", lambda t: written.append(t) or to_json(t))
    build(captured.module, target)
    (table,) = written
    assert table.machine.alignment == 256
    session = Session.to_plan(table)
    for count in (1, 10, 33):
        plan = check_plan(session, [count])
        point = analyze_memory(captured.module, {"rows": count}, target=target).worst
        assert point.peak_bytes == plan.peak_bytes
        assert (point.arena_bytes, point.escaping_bytes) == (plan.arena_bytes, plan.escaping_bytes)
        assert (
            largest(captured.module, "rows", memory_budget=plan.peak_bytes, target=target) >= count
        )


@pytest.mark.skipif(
    tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda", allow_missing=True) is not None,
    reason="the TVM that is here has a run time for CUDA",
)
def test_a_program_that_this_tvm_cannot_run_is_refused_with_what_to_do():
    with pytest.raises(ArtefactError, match=r"is for cuda, .* compile with target='llvm'"):
        relax_disc.compile(
            nn.Linear(5, 3),
            None,
            (torch.randn(3, 5),),
            dynamic_shapes=({0: Dim("rows", min=1, max=64)},),
            loss_fn=lambda model, x: model(x).square().mean(),
            target="relax_disc/h100",
        )
