"""Reductions and what follows them run as one launch, right at every shape, whatever the sizes."""

from __future__ import annotations

import shutil

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.frontend import capture_step
from relax_disc.pipeline import PipelineOptions, unscheduled
from relax_disc.tir_kernels.target import cuda_target
from tests.cuda.emulator import Emulator
from tests.cuda.stand_in import cuda_stand_in

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

SHAPES = [(3, 7), (1, 1), (2, 70)]


class Normed(nn.Module):
    """A layer norm and a root mean square over rows of ``width`` in between linear layers."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, 5)
        self.norm, self.rms = nn.LayerNorm(width), nn.RMSNorm(width)

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.second(torch.tanh(self.rms(x + torch.sin(x)))).square().mean()


def captured(model, batch):
    rows, length = Dim("rows", min=1, max=64), Dim("length", min=1, max=128)
    return {
        "example_inputs": (batch,),
        "dynamic_shapes": ({0: rows, 1: length},),
        "loss_fn": lambda model, x: model(x),
    }


def gradients(model, x):
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("width", [32, 33, 5, 2, 600])
def test_norms_are_right_on_the_emulator(width):
    torch.manual_seed(width)
    model = Normed(width)
    emulator = Emulator.load()
    emulator.take_findings()
    with cuda_stand_in(emulator), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RELAX_DISC_COMPILE_CACHE", "0")
        settings = captured(model, torch.randn(3, 7, 6))
        step = relax_disc.compile(model, None, **settings, target=cuda_target("sm_90"))
        for shape in SHAPES:
            x = torch.randn(*shape, 6)
            loss, wanted = gradients(model, x)
            model.zero_grad()
            found = step(x, update=False).item()
            assert found == pytest.approx(loss, rel=1e-5)
            for ours, theirs in zip((p.grad for p in model.parameters()), wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-6)
    findings = emulator.take_findings()
    assert not findings, "\n".join(map(str, findings))


def kernels_of(model, target, options=None):
    """Names of the kernels that a step calls, in order."""
    module = capture_step(model, None, **captured(model, torch.randn(3, 7, 6))).module
    lowered = unscheduled(module, target, options)
    calls = []

    def note(node):
        if isinstance(node, tvm.relax.Call) and getattr(node.op, "name", "") == "relax.call_tir":
            calls.append(node.args[0].name_hint)

    tvm.relax.analysis.post_order_visit(lowered["main"], note)
    return calls


def test_a_norm_is_one_launch_forward_and_two_backward():
    model = Normed(32)
    joined = kernels_of(model, cuda_target("sm_90"))
    apart = kernels_of(model, cuda_target("sm_90"), PipelineOptions(join_kernels=False))
    # Both norms are one kernel forward, with what is between them, and two backward: the rows, and
    # the sums down the columns that are gradients of the layer norm's weight and bias.
    assert len(apart) - len(joined) == 6 + 4 + 1
    assert sum(name.count("_sum") > 1 for name in joined) >= 2
    on_cpu = kernels_of(model, tvm.target.Target("llvm"))
    assert len(on_cpu) > len(joined)


class Pooled(nn.Module):
    """Batch norms of pictures whose height and width are multiples of a dim."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 6, 1)
        self.norm, self.other = nn.BatchNorm2d(6), nn.BatchNorm2d(6)

    def forward(self, x):
        return torch.relu(self.norm(self.first(x)) + self.other(self.second(x))).mean()


def test_sizes_that_are_multiples_of_dims():
    """What reads such sizes alone does not know the dims: it has no kernel with something else."""
    model = Pooled()
    batch = torch.randn(2, 3, 8, 12)
    settings = {
        "example_inputs": (batch,),
        "dynamic_shapes": ({2: 4 * Dim("high", min=1, max=8), 3: 4 * Dim("wide", min=1, max=8)},),
        "loss_fn": lambda model, x: model(x),
    }
    emulator = Emulator.load()
    emulator.take_findings()
    with cuda_stand_in(emulator), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RELAX_DISC_COMPILE_CACHE", "0")
        step = relax_disc.compile(model, None, **settings, target=cuda_target("sm_90"))
        for x in (batch, torch.randn(2, 3, 4, 16)):
            model.zero_grad()
            loss = model(x)
            loss.backward()
            wanted = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            assert step(x, update=False).item() == pytest.approx(loss.item(), rel=1e-5)
            for p, gradient in zip(model.parameters(), wanted, strict=True):
                torch.testing.assert_close(p.grad, gradient, rtol=2e-4, atol=2e-6)
    assert not emulator.take_findings()
