"""Grouped products and histograms: against PyTorch, empty groups and rows of none included."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from relax_disc.frontend import capture_forward, capture_step
from relax_disc.vm_builtins.libraries import install
from tests.frontend.running import Runner, check_gradients


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 16) / 3)

    def forward(self, x, offsets):
        x = torch.ops.transformers.grouped_mm_fallback(torch.tanh(x), self.weight, offsets)
        return x.square().mean()


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(rows + seed)
    ends = torch.randint(0, rows + 1, (3,), generator=generator).sort().values
    ends[-1] = rows
    return torch.randn(rows, 8, generator=generator), ends.to(torch.int32)


def test_gradients_of_grouped_products():
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model = Experts()
    shapes = ({0: Dim("rows", min=1, max=40)}, None)
    captured = capture_step(model, None, batch(8), dynamic_shapes=shapes)
    check_gradients(captured, model, [batch(rows) for rows in (1, 2, 40, 13)])


class Counts(nn.Module):
    def __init__(self, *limits):
        super().__init__()
        self.limits = limits

    def forward(self, x):
        return torch.histc(x, 5, *self.limits)


def test_histogram():
    shapes = ({0: Dim("rows", min=1, max=99)},)
    install.install("llvm")  # PyTorch's own kernel
    model = Counts(0, 4)
    captured = capture_forward(model, (torch.ones(3),), dynamic_shapes=shapes)
    run = Runner(captured)
    for rows in (1, 99):
        generator = torch.Generator().manual_seed(rows)
        for x in (
            torch.randint(0, 5, (rows,), generator=generator).float(),
            4 * torch.randn(rows, generator=generator),
        ):
            assert torch.equal(run(model, None, (x,))["extra"][0][1], model(x))
    run = Runner(capture_forward(Counts(), (torch.ones(3),), dynamic_shapes=shapes))
    x = torch.randn(17)
    assert torch.equal(run(Counts(), None, (x,))["extra"][0][1], Counts()(x))
