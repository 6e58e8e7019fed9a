"""Models of ``[batch, length, features]`` that train on the mean square of what they return."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def compiled(model: nn.Module, features: int, **length: int) -> Any:
    """Compile SGD's step; ``length``: the least and greatest, ``min`` and ``max``."""
    shape = {0: Dim("batch", min=1, max=4), 1: Dim("length", **length)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = (torch.randn(3, 12, features),)
    return relax_disc.compile(model, optimizer, example, dynamic_shapes=(shape,), loss_fn=_loss)


def assert_trains_as_eager(
    model: nn.Module, features: int, shapes: Iterable[tuple[int, int]], **length: int
) -> None:
    """One step of each shape changes the model as PyTorch's changes a copy of it."""
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    step = compiled(model, features, **length)
    for batch, positions in shapes:
        x = torch.randn(batch, positions, features)
        loss = step(x)
        optimizer.zero_grad()
        expected = _loss(eager, x)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
