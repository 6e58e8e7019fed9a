"""einx, which takes sizes as plain numbers, inside a model of symbolic sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import UnsupportedOperatorError

einx = pytest.importorskip("einx")


class Distances(nn.Module):
    """Attention by distances; ``(s b)`` is a product of two dims."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        distance = einx.subtract("j, i -> i j", places, places).abs()
        scores = einx.multiply("h, i j -> h i j", self.slope, -distance)
        streams = einx.add("b n d, s d -> (s b) n d", x, self.slope[None].expand(2, 3))
        return scores.softmax(-1).mean(0) @ streams


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _compiled(model: nn.Module) -> Any:
    shape = {0: Dim("batch", min=1, max=4), 1: Dim("length", min=1, max=32)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = (torch.randn(3, 12, 3),)
    return relax_disc.compile(model, optimizer, example, dynamic_shapes=(shape,), loss_fn=_loss)


def test_einx_trains_at_every_size() -> None:
    torch.manual_seed(0)
    model = Distances()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    step = _compiled(model)
    for batch, length in ((3, 12), (1, 1), (4, 7), (1, 32)):
        x = torch.randn(batch, length, 3)
        loss = step(x)
        optimizer.zero_grad()
        expected = _loss(eager, x)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.slope, eager.slope)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return einx.id("b n d, b m d -> b ((n + m) d)", x * self.weight, x[:, 1:])


def test_a_size_that_is_a_sum_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"test_einx.py:\d+: einx makes a size"):
        _compiled(Joined())


def test_einx_sees_plain_numbers_again() -> None:
    from einx._src.frontend.impl import torch as home

    _compiled(Distances())
    assert "int" not in vars(home)
