"""NaN goes through extrema as it does in eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import relax_disc

FUNCTIONS = {
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(0),
    "max of an axis": lambda x: x.max(1).values,
    "aminmax": lambda x: x.aminmax(dim=1).max,
    "greatest norm": lambda x: torch.linalg.vector_norm(x, float("inf"), 1),
}


class _All(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return {name: function(x * self.scale) for name, function in FUNCTIONS.items()}


@pytest.fixture(scope="module")
def compiled():
    model = _All()
    batch = torch.export.Dim("batch", min=1, max=9)
    function = relax_disc.compile_forward(model, (torch.randn(5, 4),), dynamic_shapes=({0: batch},))
    return model, function


def test_not_a_number_wins(compiled):
    model, function = compiled
    for size in (1, 6):
        x = torch.randn(size, 4)
        x[size - 1, 2] = float("nan")
        found, wanted = function(x), model(x)
        for name in FUNCTIONS:
            torch.testing.assert_close(found[name], wanted[name].detach(), equal_nan=True)
