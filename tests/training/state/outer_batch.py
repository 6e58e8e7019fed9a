"""A batch for models that read or write what is outside them, and their steps beside eager."""

import torch
from torch.export import Dim

import relax_disc
from relax_disc.frontend.capture.exported.export import export, wrap_step

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
SHAPES = ({0: Dim("batch", max=64)},)


class Holder:
    def __init__(self, held):
        self.held = held


def compiled(model, *batch, lr=0.0, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    shapes = tuple({0: Dim("batch", min=1, max=64)} for _ in batch)
    return relax_disc.compile(model, optimizer, batch, dynamic_shapes=shapes, **options)


def agree(step, loss_fn, model, x=X):
    torch.testing.assert_close(step(x), loss_fn(model, x).detach(), rtol=1e-4, atol=1e-5)


def distance(model, x):
    return model(x).pow(2).mean()


def captured(model, loss_fn):
    """What an export finds, without a compilation."""
    return export(wrap_step(model, loss_fn), (X,), SHAPES)
