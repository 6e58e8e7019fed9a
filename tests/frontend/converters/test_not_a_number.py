"""NaN, infinities and their gradients are those of eager PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import relax_disc

ROWS = torch.tensor(
    [
        [math.nan, 1.0, 2.0, -1.0],
        [math.inf, 1.0, -2.0, 0.2],
        [-math.inf] * 4,
        [math.inf] * 4,
        [1.0, math.nan, math.inf, math.nan],
        [0.5, -0.5, 88.0, -3.0],
    ]
)


def _labels(x):
    return torch.arange(x.shape[0]) % 4


FUNCTIONS = {
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(1),
    "kept amax": lambda x: x.amax((0, 1), keepdim=True),
    "amin": lambda x: x.amin(0),
    "max of an axis": lambda x: x.max(1).values,
    "aminmax": lambda x: x.aminmax(dim=1).max,
    "greatest norm": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "count of non-zeros": lambda x: torch.linalg.vector_norm(x, 0, 1),
    "first maximum": lambda x: torch.stack([x.argmax(1), x.max(1).indices, x.min(1).indices]),
    "first minimum": lambda x: x.argmin(),
    "sorted": lambda x: x.sort(1).values,
    "greatest two": lambda x: x.topk(2).values,
    "softshrink": F.softshrink,
    "times zero": lambda x: x * 0.0,
    "itself less itself": lambda x: x - x.detach(),
    "unequal": lambda x: x != x.flip(1),
    "unlike itself": lambda x: torch.stack([x != x, x == x]),
    "neither less nor greater": lambda x: ~((x < 0) | (x >= 0)),
    "not less": lambda x: (x < x.flip(1)).logical_not(),
    "mean without": lambda x: x.nanmean(1),
    "clamped": lambda x: x.clamp(x.new_full((), -0.8), x.flip(1)),
    "greater of two": lambda x: torch.fmax(x, x.flip(1)),
    "remainder": lambda x: torch.remainder(x * 1e9, 0.7) + torch.fmod(x, x.flip(1)),
    "division rounded down": lambda x: torch.div(x, x.flip(1), rounding_mode="floor"),
    "division cut off": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "expm1": torch.expm1,
    "margins": lambda x: F.multi_margin_loss(x, _labels(x), reduction="none"),
    "margins of several": lambda x: F.multilabel_margin_loss(
        x, torch.stack([_labels(x), torch.full_like(_labels(x), -1)], 1).repeat(1, 2)
    ),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x.flip(1) * 0.7, reduction="none"),
    "log sigmoid": F.logsigmoid,
}
WITHOUT_GRADIENT = {
    "first maximum",
    "first minimum",
    "unequal",
    "unlike itself",
    "neither less nor greater",
    "not less",
    "greatest two",  # of equals, any
    # PyTorch chooses by the place in memory, in the vectorised part and the rest of a loop.
    "softshrink",
    "greater of two",
    "count of non-zeros",
}


class _All(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return {name: function(x * self.scale) for name, function in FUNCTIONS.items()}


class _Sums(nn.Module):
    """Functions of the batch, each added to a parameter of zeros to have its gradient."""

    def __init__(self):
        super().__init__()
        names = [name for name in FUNCTIONS if name not in WITHOUT_GRADIENT]
        self.zeros = nn.ParameterDict({n: nn.Parameter(torch.zeros(6, 4)) for n in names})

    def forward(self, x):
        parts = [FUNCTIONS[name](zero + x[:6]).sum() for name, zero in self.zeros.items()]
        return torch.stack(parts).sum()


@pytest.fixture(scope="module")
def compiled():
    model = _All()
    batch = torch.export.Dim("batch", min=1, max=9)
    function = relax_disc.compile_forward(model, (torch.randn(5, 4),), dynamic_shapes=({0: batch},))
    return model, function


@pytest.mark.parametrize("rows", [6, 1, 3])
def test_values(compiled, rows):
    model, function = compiled
    found, wanted = function(ROWS[:rows]), model(ROWS[:rows])
    for name in FUNCTIONS:
        torch.testing.assert_close(found[name], wanted[name].detach(), equal_nan=True, msg=name)


def test_gradients():
    model, batch = _Sums(), torch.export.Dim("batch", min=6, max=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = relax_disc.compile(model, optimizer, (torch.ones(8, 4),), dynamic_shapes=({0: batch},))
    step.check_finite = False
    step(ROWS)
    for name, zero in model.zeros.items():
        x = ROWS.clone().requires_grad_()
        FUNCTIONS[name](x).sum().backward()
        found = optimizer.state[zero]["momentum_buffer"]
        torch.testing.assert_close(found, x.grad, equal_nan=True, msg=name)
