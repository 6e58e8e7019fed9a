"""Packed sequences for CUDA: one build, several lengths, as PyTorch on the CPU."""

from __future__ import annotations

import shutil

import pytest
import torch

from relax_disc.tir_kernels.target import cuda_target
from tests.cuda.stand_in import emulator_without_findings
from tests.tiers import every
from tests.training.beside_eager import assert_trains_as_eager
from tests.training.packed_models import MODELS, batch_of, compiled, optimizer_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.mark.parametrize("name", every(4, list(MODELS)))
def test_a_step_is_pytorchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    torch.manual_seed(0)
    with emulator_without_findings():
        step = compiled(MODELS[name](), target=cuda_target("sm_90"))
        batches = ((size, batch_of(*size)) for size in ((4, 9), (1, 1), (3, 12)))
        assert_trains_as_eager(step, optimizer_of, batches, atol=1e-5)
