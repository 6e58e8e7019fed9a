"""Packed sequences for CUDA: one build, several lengths, as PyTorch on the CPU."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

from relax_disc.tir_kernels.target import cuda_target
from tests.cuda.stand_in import emulator_without_findings
from tests.tiers import every
from tests.training.packed_models import MODELS, batch_of, compiled

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.mark.parametrize("name", every(4, list(MODELS)))
def test_a_step_is_pytorchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    torch.manual_seed(0)
    with emulator_without_findings():
        model = MODELS[name]()
        step = compiled(model, target=cuda_target("sm_90"))
        eager = copy.deepcopy(model)
        optimizer = torch.optim.SGD(eager.parameters(), lr=0.05)
        for size in ((4, 9), (1, 1), (3, 12)):
            batch = batch_of(*size)
            optimizer.zero_grad()
            expected = eager(*batch)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(step(*batch), expected.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-4)
            planned = step.plan(batch=size[0], length=size[1]).peak_bytes
            assert step.memory_report().peak_bytes == planned
