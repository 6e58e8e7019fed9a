"""Pooling in a trained step equals eager PyTorch's, on NaN and infinities too."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc

RANGES = [("rows", 1, 4), ("high", 5, 11), ("wide", 5, 11)]
SIZES = [(3, 6, 9), (1, 5, 5), (4, 11, 8), (2, 5, 7)]
VOLUMES = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.AvgPool3d((1, 2, 2)))
LAYERS = {
    "max": nn.MaxPool2d(3, 2, 1),
    "max, dilated": nn.MaxPool2d(2, 1, 1, dilation=2),
    "max, ceil": nn.MaxPool2d(2, 2, ceil_mode=True),
    "average": nn.AvgPool2d(3, 2, 1),
    "average, without padding": nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "average, divisor": nn.AvgPool2d(2, 2, divisor_override=3),
    "adaptive average": nn.AdaptiveAvgPool2d((2, 3)),
    "adaptive max": nn.AdaptiveMaxPool2d((2, 3)),
    "max of volumes": nn.Sequential(nn.Unflatten(1, (2, 2)), nn.MaxPool3d((1, 2, 2))),
    "average of volumes": VOLUMES,
    "adaptive max of volumes": nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.AdaptiveMaxPool3d((2, 3, 4))
    ),
    "adaptive average of volumes": nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.AdaptiveAvgPool3d((2, 3, 4))
    ),
    "max of one axis": nn.Sequential(nn.Flatten(2), nn.MaxPool1d(3, 2, 1)),
}


class Pools(nn.Module):
    """Every kind of pooling of one input, times a weight that gets what the kind sends back."""

    def __init__(self, dtype):
        super().__init__()
        missing = VOLUMES if dtype == torch.bfloat16 else None  # PyTorch has no such kernel
        self.kinds = nn.ModuleList(kind for kind in LAYERS.values() if kind is not missing)
        self.weights = nn.ParameterList(torch.ones(4, 11, 11, dtype=dtype) for _ in self.kinds)

    def forward(self, x, y):
        _, _, high, wide = x.shape
        found = []
        for kind, weight in zip(self.kinds, self.weights, strict=True):
            pooled = kind(x * weight[:, :high, :wide])
            places = torch.arange(pooled[0].numel(), device=x.device).cos()  # each counts otherwise
            found.append((pooled * places.to(x.dtype).reshape(pooled.shape[1:])).mean())
        single = self.kinds[0]((x * self.weights[0][:, :high, :wide])[0]).mean()
        return torch.stack([*found, single]).mean() + y.mean()


def batch(dtype, rows, high, wide, strange):
    generator = torch.Generator().manual_seed(rows + 10 * high + 100 * wide)
    x = torch.randn(rows, 4, high, wide, generator=generator)
    for value in strange:
        where = torch.randint(0, x.numel(), (3,), generator=generator)
        x.view(-1)[where] = value
    return x.to(dtype), torch.zeros(rows, dtype=dtype)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)],
)
def test_a_step_with_pooling_is_eagers(dtype):
    model = Pools(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows, high, wide = (Dim(name, min=low, max=top) for name, low, top in RANGES)
    step = relax_disc.compile(
        model,
        optimizer,
        batch(dtype, 3, 6, 9, ()),
        dynamic_shapes=({0: rows, 2: high, 3: wide}, {0: rows}),
    )
    for strange in ((), (math.inf, -math.inf), (math.nan,)):
        for sizes in SIZES:
            given = batch(dtype, *sizes, strange)
            twin = copy.deepcopy(model)
            twin(*given).backward()
            model.zero_grad()
            step(*given, update=False)
            for kind, own, theirs in zip(model.kinds, model.weights, twin.weights, strict=True):
                torch.testing.assert_close(
                    own.grad, theirs.grad, equal_nan=True, msg=lambda m, k=kind: f"{k}: {m}"
                )
            report = step.memory_report()
            assert report.peak_bytes == report.planned_peak_bytes
