"""A batch for models that read or write what is outside them, and their steps beside eager."""

import torch
from torch.export import Dim

import relax_disc

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def compiled(model, *batch, lr=0.0, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    shapes = tuple({0: Dim("batch", min=1, max=64)} for _ in batch)
    return relax_disc.compile(model, optimizer, batch, dynamic_shapes=shapes, **options)


def agree(step, loss_fn, model, x=X):
    torch.testing.assert_close(step(x), loss_fn(model, x).detach(), rtol=1e-4, atol=1e-5)
