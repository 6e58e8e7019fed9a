"""Numbers that the model takes out of tensors, by ``.item()``, as operands: as in eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
from tests.tiers import every
from tests.training.beside_eager import assert_trains_as_eager

SIZES = ((4, 9), (1, 1), (3, 12), (2, 2))


class _Model(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), x).square().mean()


def divided(h: Tensor, x: Tensor) -> Tensor:
    return h / x.abs().max().item() + 1 / (1 + (x > 0).sum().item()) - h


def counted(h: Tensor, x: Tensor) -> Tensor:
    return h.sum() / (int((x > 0).sum()) + 1)


def real(h: Tensor, x: Tensor) -> Tensor:
    spread = float(x.std(correction=0)) + 0.5
    return h * spread + 1 / spread


def root(h: Tensor, x: Tensor) -> Tensor:
    return h * math.sqrt((x > 0).sum().item())


def bounded(h: Tensor, x: Tensor) -> Tensor:
    most = x.max().item()
    return h.clamp(-0.5, most) + torch.clamp(h, max=most) + h.clamp(min=most - 1)


def masked(h: Tensor, x: Tensor) -> Tensor:
    return h.masked_fill(x > 0, x.min().item()) + torch.where(x > 0, h, x.max().item())


def filled(h: Tensor, x: Tensor) -> Tensor:
    mean, many = x.mean().item(), (x > 0).sum().item()
    made = torch.full_like(h, mean) + torch.full((6,), mean) + h.new_full((6,), many)
    return h * made * torch.tensor([mean, 1.0, mean, many, 0.5, mean])


def compared(h: Tensor, x: Tensor) -> Tensor:
    middle = x.mean().item()
    return h * (x > middle) + h.abs().pow(2 + middle) * (x.long() % (1 + (x > 0).sum().item()))


def written_afterwards(h: Tensor, x: Tensor) -> Tensor:
    """The number is that of the moment at which it was taken."""
    count = (x > 0).sum() + 1
    before = count.item()
    count += 5
    return h * before + h / count.item()


def of_whole_numbers(h: Tensor, x: Tensor) -> Tensor:
    most = int((x > 0).sum())
    ids = torch.arange(h.shape[1]).clamp(0, most)
    assert ids.dtype == torch.int64
    return h * torch.where(ids > 1, ids, most)[:, None]


def with_a_gradient(h: Tensor, x: Tensor) -> Tensor:
    """The number is a constant to the gradient."""
    return h / h.norm().item()


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


_FUNCTIONS = (divided, counted, real, root, bounded, masked, filled, compared, with_a_gradient)
_FUNCTIONS += (written_afterwards, of_whole_numbers)


@pytest.mark.parametrize("function", every(4, _FUNCTIONS), ids=lambda f: f.__name__)
def test_numbers_are_operands_as_in_eager(function: Any) -> None:
    torch.manual_seed(0)
    model = _Model(function)
    shape = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=16)}
    example, optimizer = (torch.randn(3, 7, 6),), _optimizer(model.parameters())
    step = relax_disc.compile(model, optimizer, example, dynamic_shapes=(shape,))
    batches = ((size, (torch.randn(*size, 6),)) for size in SIZES)
    assert_trains_as_eager(step, _optimizer, batches)
