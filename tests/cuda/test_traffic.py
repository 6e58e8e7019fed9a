"""What CUDA kernels move: no sector of 32 bytes more often than needed, or for a stated reason.

`traffic.json` lists, by model, the launches and library calls of a step (more fail the test) and
the kernels that move more than 1.15 times the least, or do in one thread what many could, each with
the reason. A listed kernel that has become good fails the test too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.models import worker
from benchmarks.models.catalogue import entry_named
from relax_disc.compiler import build_or_reuse
from relax_disc.tir_kernels.target import cuda_target
from tests.cuda.emulator import Emulator
from tests.cuda.stand_in import cuda_stand_in

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

LISTED = json.loads((Path(__file__).parent / "traffic.json").read_text())
MOST = 1.15


def step_calls(name):
    """One step of a model of the catalogue at its last shape, with AdamW."""
    entry = entry_named(name)
    emulator = Emulator.load()

    def build_for_cuda(module, target):
        return build_or_reuse(module, cuda_target("sm_90"))

    with (
        cuda_stand_in(emulator),
        mock.patch.object(worker, "build_or_reuse", build_for_cuda),
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("RELAX_DISC_COMPILE_CACHE", "0")
        torch.manual_seed(0)
        model = entry.make().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = worker._compiled(entry, model, optimizer, {}, worker.HOST)
        emulator.forget()
        step(**dict(entry.batch(*entry.sizes[-1])))
    assert not emulator.take_findings()
    return list(emulator.calls), list(emulator.events)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "Llama" else [pytest.mark.slow]) for n in LISTED],
)
def test_kernels_move_little_more_than_they_must(name):
    calls, events = step_calls(name)
    listed = LISTED[name]
    found = {
        call.function: round(call.traffic_ratio(), 2)
        for call in calls
        if call.traffic_ratio() > MOST or call.is_one_thread
    }
    assert found.keys() == listed["kernels"].keys(), found
    assert all(reason for reason in listed["kernels"].values())
    assert sum(event.startswith("launch") for event in events) <= listed["launches"]
    assert sum(event.startswith("library") for event in events) <= listed["library_calls"]
