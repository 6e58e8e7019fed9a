"""Random training programs: every step equals eager's or is refused with nothing written."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.training.fuzz import judge
from tests.training.fuzz.program import run

# Eager warns of sizes that differ, variances of one value, hooks without gradients, schedules, ...
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("first", range(0, 25, 5))
def test_programs(first):
    for seed in range(first, first + 5):
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(25, 505, 10))
def test_more_programs(first):
    for seed in range(first, first + 10):
        run(seed)


class Centred(nn.Module):
    """Its bias has no gradient but what rounding makes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        return (h - h.mean(0)).tanh().square().mean()


def test_rounding_explains_a_noise_and_nothing_else():
    model = Centred()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05)
    batch = [torch.randn(7, 4)]
    before = model, [optimizer]
    wanted = judge.train(*copy.deepcopy(before), batch)

    def off(name, change):
        found = wanted | {name: wanted[name] + change}
        return [text.split()[0] for text in judge.differences(found, wanted, before, batch)]

    assert wanted["linear.bias.grad"].abs().max() < 1e-7
    assert off("linear.bias", 0.05) == []  # another noise would have led there
    assert off("linear.weight", 0.002) == ["linear.weight"]
    assert off("0.0 square_avg", 0.002) == ["0.0"]
    assert off("result 0", 0.001) == ["result"]
