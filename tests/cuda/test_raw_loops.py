"""Scatters and cumulative sums run in many threads: right at every shape, no race, no atomics."""

from __future__ import annotations

import shutil

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.frontend import capture_step
from relax_disc.pipeline import unscheduled
from relax_disc.tir_kernels.cuda import OneThread, RawLoops
from relax_disc.tir_kernels.target import cuda_target
from relax_disc.transform.schedule_kernels import without_marks
from tests.cuda.emulator import Emulator
from tests.cuda.stand_in import cuda_stand_in

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

KEPT = 7


class Scattering(nn.Module):
    """Writes and adds at positions that repeat, along each axis; sums that go on."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(KEPT, 40))
        self.line = nn.Parameter(torch.randn(KEPT))

    def forward(self, x, ids):
        rows, length = ids.shape
        flat = ids.reshape(-1)
        added = torch.zeros(KEPT, 40).index_add(0, flat, x.reshape(-1, 40))
        last = torch.zeros(rows, KEPT).scatter_add(1, ids, x[..., 0])
        first = torch.zeros(KEPT, length).scatter_add(0, ids, x[..., 1])
        line = torch.zeros(KEPT).index_put((flat,), x[..., 2].reshape(-1), accumulate=True)
        put = torch.zeros(rows, KEPT).scatter(1, ids[:, :2], x[:, :2, 3])
        sums = x[..., 4].cumsum(1).square().mean() + x[:, :, 5].cumsum(0).square().mean()
        counted = (ids.cumsum(1) * torch.arange(length)).sum()
        grown = (1 + 0.01 * x[..., 6]).cumprod(1)
        looked_up = (self.table[flat] * x.reshape(-1, 40)).sum(1) + self.line[flat].exp()
        parts = [added @ self.table.t(), last * self.line, first.sin(), line * self.line, put]
        loss = sum(part.square().mean() for part in parts) + sums + grown.mean()
        return loss + looked_up.mean() + counted * 1e-3


def settings(batch):
    rows, length = Dim("rows", min=1, max=64), Dim("length", min=2, max=4096)
    shape = {0: rows, 1: length}
    return {"example_inputs": batch, "dynamic_shapes": (shape, shape), "loss_fn": _loss}


def _loss(model, x, ids):
    return model(x, ids)


def batch_of(rows, length):
    return torch.randn(rows, length, 40), torch.randint(0, KEPT, (rows, length))


def test_no_kernel_is_left_to_one_thread():
    model = Scattering()
    captured = capture_step(model, torch.optim.SGD(model.parameters()), **settings(batch_of(3, 5)))
    target = cuda_target("sm_90")
    lowered = unscheduled(captured.module, target)
    raw = [
        without_marks(f)
        for v, f in lowered.functions_items()
        if isinstance(f, tvm.tirx.PrimFunc)
        and v.name_hint.startswith(("index_put", "scatter", "cumsum", "cumprod"))
    ]
    assert len(raw) >= 6
    scheduled = [RawLoops().apply(kernel, target) for kernel in raw]
    in_vectors = [made for made in scheduled if made and "T.vectorized" in made.mod.script()]
    assert in_vectors  # of rows of 40
    for kernel in raw:
        if OneThread().apply(kernel, target) is not None:
            assert RawLoops().apply(kernel, target) is not None, kernel


def test_results_are_right_and_nothing_races():
    torch.manual_seed(0)
    model = Scattering()
    emulator = Emulator.load()
    emulator.take_findings()
    steps = {"cpu": relax_disc.compile(model, None, **settings(batch_of(3, 5)))}
    with cuda_stand_in(emulator), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RELAX_DISC_COMPILE_CACHE", "0")
        steps["cuda"] = relax_disc.compile(
            model, None, **settings(batch_of(3, 5)), target=cuda_target("sm_90")
        )
        for shape in [(3, 5), (1, 2), (2, 300), (40, 33)]:
            batch = batch_of(*shape)
            model.zero_grad()
            loss = model(*batch)
            loss.backward()
            wanted = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            for name, step in steps.items():
                model.zero_grad()
                emulator.seed += 1
                emulator.forget()
                found = [step(*batch, update=False), *(p.grad for p in model.parameters())]
                for ours, theirs in zip(found, wanted, strict=True):
                    torch.testing.assert_close(
                        ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
                    )
            assert not [call.function for call in emulator.calls if call.is_one_thread]
    findings = emulator.take_findings()
    assert not findings, "\n".join(map(str, findings))
