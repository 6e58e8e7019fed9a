"""Steps of convolution networks against PyTorch, at several shapes from one compilation."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc

SHAPES = [(3, 20, 24), (1, 16, 16), (5, 28, 16)]


class Odd(nn.Module):
    """Few channels, groups, dilation, strides; batch norm and a residual sum between them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 5, stride=2, padding=2)
        self.norm = nn.BatchNorm2d(6)
        self.deep = nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=6)
        self.grouped = nn.Conv2d(6, 9, (1, 3), padding=(0, 1), groups=3, bias=False)
        self.up = nn.ConvTranspose2d(9, 4, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = x + self.deep(x)
        return (self.up(torch.cat([self.grouped(x), self.grouped(-x)], 1)[:, 2:11]) ** 2).mean()


class Line(nn.Module):
    """One spatial axis and a transposed convolution in groups."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, 8, 7, stride=3, padding=3)
        self.up = nn.ConvTranspose1d(8, 6, 4, stride=2, padding=1, groups=2)

    def forward(self, x):
        return self.up(torch.tanh(self.first(x.flatten(2)))).pow(2).mean()


class Space(nn.Module):
    """Three spatial axes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.second = nn.Conv3d(4, 2, (1, 3, 3), stride=(1, 2, 2))

    def forward(self, x):
        return self.second(self.first(torch.stack([x, x * x, -x], 2)).relu()).pow(2).mean()


@pytest.mark.parametrize("make", [Odd, Line, Space])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_are_those_of_pytorch(make, dtype):
    torch.manual_seed(0)
    model = make().to(dtype).train()
    expected = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, expected))
    batch, high, wide = Dim("batch", min=1, max=8), Dim("high", min=2), Dim("wide", min=2)
    step = relax_disc.compile(
        model,
        mine,
        (torch.randn(2, 1, 32, 20, dtype=dtype),),
        dynamic_shapes=({0: batch, 2: 4 * high, 3: 4 * wide},),
    )
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for sizes in SHAPES:
        x = torch.randn(sizes[0], 1, *sizes[1:], dtype=dtype)
        loss = step(x)
        theirs.zero_grad()
        exact = expected(x)
        exact.backward()
        theirs.step()
        torch.testing.assert_close(loss, exact.detach(), rtol=tolerance, atol=tolerance)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(
                model.state_dict()[name], value, rtol=tolerance, atol=tolerance, msg=name
            )
        report = step.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes


def test_results_are_the_same_under_a_budget():
    torch.manual_seed(0)
    states = []
    for share in (1.0, 0.6):
        torch.manual_seed(0)
        model = Odd()
        batch = Dim("batch", min=1, max=8)
        step = relax_disc.compile(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            (torch.randn(2, 1, 32, 32),),
            dynamic_shapes=({0: batch},),
        )
        plan = step.plan(batch=8)
        if share < 1:
            step.memory_budget = plan.peak_bytes - int((1 - share) * plan.arena_bytes)
            least = step.plan(batch=8)
            if not least.fits:
                step.memory_budget = least.least_bytes
        x = torch.randn(8, 1, 32, 32, generator=torch.Generator().manual_seed(1))
        losses = [step(x).item() for _ in range(3)]
        states.append((losses, {name: t.clone() for name, t in model.state_dict().items()}))
    assert states[0][0] == states[1][0]
    for name, value in states[0][1].items():
        assert torch.equal(value, states[1][1][name])
