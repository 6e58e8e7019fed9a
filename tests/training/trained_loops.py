"""Models with a Python loop over a dynamic length, trained next to eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import relax_disc

LONGEST = 32

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(model(x), y)


def compiled(model: nn.Module, make: MakeOptimizer, least: int = 1) -> Any:
    """Compile a model of ``[B, T, 6]`` to ``[B, T, 3]``; ``least``: of the lengths T."""
    batch, length = Dim("batch", min=1, max=8), Dim("length", min=least, max=LONGEST)
    shapes = ({0: batch, 1: length}, {0: batch, 1: length})
    example = (torch.randn(4, 12, 6), torch.randn(4, 12, 3))
    optimizer = make(model.parameters())
    return relax_disc.compile(model, optimizer, example, dynamic_shapes=shapes, loss_fn=loss_of)


def assert_trains_as_eager(
    model: nn.Module, make: MakeOptimizer, sizes: Iterable[tuple[int, int]], least: int = 1
) -> None:
    """Check losses, parameters and planned peaks of one step at each size, in turn."""
    eager = copy.deepcopy(model)
    optimizer = make(eager.parameters())
    step = compiled(model, make, least)
    for batch, length in sizes:
        x, y = torch.randn(batch, length, 6), torch.randn(batch, length, 3)
        loss = step(x, y)
        optimizer.zero_grad()
        expected = loss_of(eager, x, y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        planned = step.plan(batch=batch, length=length).peak_bytes
        assert step.memory_report().peak_bytes == planned
