"""A small step for the tests of gradient accumulation, and batches for it."""

import torch
from torch import nn
from torch.export import Dim

import relax_disc


class Net(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 1)
        self.rate = rate

    def forward(self, x):
        hidden = nn.functional.dropout(torch.tanh(self.first(x)), self.rate)
        return (self.second(hidden) - 1).square().mean()


def quarter(model, x):
    return model(x) / 4


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, dampening=0.5),
}


def make(kind="adamw", rate=0.0, loss_fn=quarter, **options):
    torch.manual_seed(0)
    model = Net(rate)
    optimizer = OPTIMIZERS[kind](model.parameters())
    shapes = ({0: Dim("rows", min=1, max=64)},)
    args = (torch.randn(4, 6),)
    return relax_disc.compile(
        model, optimizer, args, dynamic_shapes=shapes, loss_fn=loss_fn, **options
    )


def batches(count, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 6, generator=generator) for _ in range(count)]


def close(first, second):
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
