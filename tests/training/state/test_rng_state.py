"""Dropout end to end: each call draws anew, and a saved state repeats the numbers."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from relax_disc.errors import InputMismatchError
from relax_disc.frontend.random_ops import Randomness
from tests import philox  # noqa: F401  the random operators in eager PyTorch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return F.dropout(self.linear(x), 0.5).square().mean()


def test_state_moves_on_and_repeats():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shapes = ({0: Dim("n", min=1, max=16)},)
    step = relax_disc.compile(model, optimizer, (torch.randn(4, 8),), dynamic_shapes=shapes)
    x = torch.randn(5, 8)
    start = step.rng_state
    losses = [step(x).item() for _ in range(2)]
    assert losses[0] != losses[1]
    assert step.rng_state.tolist() == [start[0].item(), start[1].item() + 2]
    step.rng_state = start
    assert [step(x).item() for _ in range(2)] == losses
    mask = Randomness(start).keep((5, 8), 0.5)
    expected = (model.linear(x) * mask / 0.5).square().mean().item()
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputMismatchError):
        step.rng_state = torch.zeros(3)
