"""Updates of parameters share launches: the same bits, and next to nothing is kept for it."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
from unittest import mock

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.tir_kernels.target import cuda_target
from relax_disc.transform.fusion import join_updates
from tests.cuda.stand_in import emulator_without_findings

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

UPDATE = re.compile(r"(^|_)updates?\d*$")


class Tower(nn.Module):
    """Layers of several shapes, with a norm whose weight is read in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 40), nn.Linear(40, 40)
        self.norm, self.third = nn.LayerNorm(40), nn.Linear(40, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = self.norm(x + torch.tanh(self.second(x)))
        return (self.third(x) * self.scale).square().mean()


def adamw(model):
    rest = [p for name, p in model.named_parameters() if name != "norm.weight"]
    groups = [{"params": rest}, {"params": [model.norm.weight], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def compiled(model, joined=True, make_optimizer=adamw, **options):
    rows = Dim("rows", min=1, max=4096)
    plain = mock.patch("relax_disc.pipeline.JoinUpdates", lambda: tvm.transform.Sequential([]))
    with contextlib.nullcontext() if joined else plain:
        return relax_disc.compile(
            *(model, make_optimizer(model), (torch.randn(3, 6),)),
            dynamic_shapes=({0: rows},),
            loss_fn=lambda model, x: model(x),
            target=cuda_target("sm_90"),
            **options,
        )


@pytest.fixture
def emulator(monkeypatch):
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    with emulator_without_findings() as emulator:
        yield emulator


def updates(emulator):
    return [call.function for call in emulator.calls if UPDATE.search(call.function)]


def trained(emulator, model, step):
    """Losses, what was updated, and the kernels that did it in the last step."""
    losses = []
    for rows in (3, 1, 300):
        emulator.forget()
        emulator.seed += 1
        torch.manual_seed(rows)
        losses.append(step(torch.randn(rows, 6)).clone())
    state = {f"{k}.{name}": x for k, s in step.optimizer.state_dict()["state"].items()
             for name, x in s.items()}  # fmt: skip
    launches = [len(call.launches) for call in emulator.calls if UPDATE.search(call.function)]
    assert set(launches) == {1}
    return torch.stack(losses), {**model.state_dict(), **state}, updates(emulator)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_joined_updates_make_the_same_bits(emulator, clip):
    torch.manual_seed(0)
    model = Tower()
    twin = copy.deepcopy(model)
    # What needs all gradients anyway joins without limit.
    most = join_updates.MOST_KEPT_BYTES if clip is None else 0
    with mock.patch.object(join_updates, "MOST_KEPT_BYTES", most):
        joined = trained(emulator, model, compiled(model, max_grad_norm=clip))
    apart = trained(emulator, twin, compiled(twin, joined=False, max_grad_norm=clip))
    assert torch.equal(joined[0], apart[0])
    assert joined[1].keys() == apart[1].keys()
    assert all(torch.equal(value, apart[1][name]) for name, value in joined[1].items())
    assert (joined[2], len(apart[2])) == (["updates"], 8)


def test_what_is_kept_for_a_join_is_bounded(emulator):
    """Only what fits the bound joins, the smallest first, and peaks rise by no more than it."""
    bound = 1024
    with mock.patch.object(join_updates, "MOST_KEPT_BYTES", bound):
        step = compiled(Tower())
    apart = compiled(Tower(), joined=False)
    for rows in (1, 2, 7, 64, 1000, 4096):
        ours, theirs = step.plan(rows=rows), apart.plan(rows=rows)
        assert ours.live_peak_bytes <= theirs.live_peak_bytes + bound
        assert ours.least_bytes <= theirs.least_bytes + bound
    step(torch.randn(3, 6))
    found = updates(emulator)
    # 6400 and 960 bytes of weights stay apart; 480 bytes, four times 160, and 4 do not all fit.
    assert found.count("updates") == 1
    assert 3 <= len(found) <= 4


def test_a_launch_takes_no_more_parameters_than_fit(emulator):
    with mock.patch.object(join_updates, "_MOST_PARAMETERS", 25):
        step = compiled(Tower())
    step(torch.randn(3, 6))
    assert len(updates(emulator)) == 3  # eight updates of eight parameters each
