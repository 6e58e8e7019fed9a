"""Models with a Python loop over a dynamic length, trained next to eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import relax_disc
from tests.training import beside_eager
from tests.training.beside_eager import MakeOptimizer

LONGEST = 32


class Recurrent(nn.Module):
    """``[B, T, 6]`` to ``[B, T, 3]`` by a loop that a subclass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(6, 8)
        self.second = nn.RNNCell(8, 8)
        self.out = nn.Linear(8, 3)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.run(x))

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError


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
    batches = ((size, (torch.randn(*size, 6), torch.randn(*size, 3))) for size in sizes)
    beside_eager.assert_trains_as_eager(compiled(model, make, least), make, batches, loss_of)
