"""Bilinear resizing stays one operator, of which values and gradients are eager PyTorch's."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from relax_disc.frontend import capture_step


class Resized(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        x = x * self.weight
        doubled = F.interpolate(x, scale_factor=2, mode="bilinear")
        fixed = F.interpolate(x, size=(7, 4), mode="bilinear", align_corners=True)
        same = F.interpolate(fixed, size=x.shape[2:], mode="bilinear")
        return (doubled**2).mean() + (fixed**3).mean() + (same * x).mean()


@pytest.fixture(scope="module")
def compiled():
    model = Resized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, high, wide = (Dim(name, min=2, max=12) for name in ("rows", "high", "wide"))
    shapes = ({0: rows, 2: high, 3: wide},)
    example = (torch.randn(3, 3, 5, 6),)
    calls = str(capture_step(model, optimizer, example, dynamic_shapes=shapes).module)
    return model, relax_disc.compile(model, optimizer, example, dynamic_shapes=shapes), calls


def test_it_is_one_operator(compiled):
    assert compiled[2].count("aten::upsample_bilinear2d_backward") == 3


@pytest.mark.parametrize("sizes", [(3, 5, 6), (2, 2, 2), (5, 12, 7)])
def test_gradients_are_eagers(compiled, sizes):
    model, step, _ = compiled
    rows, high, wide = sizes
    x = torch.randn(rows, 3, high, wide)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    loss = twin(x)
    loss.backward()
    model.zero_grad()
    torch.testing.assert_close(step(x, update=False), loss.detach())
    torch.testing.assert_close(model.weight.grad, twin.weight.grad, rtol=1e-5, atol=1e-6)
    report = step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes
