"""einx, which takes sizes as plain numbers, inside a model of symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from relax_disc.errors import UnsupportedOperatorError
from tests.frontend.capture.squares import assert_trains_as_eager, compiled

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


def test_einx_trains_at_every_size() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(Distances(), 3, ((3, 12), (1, 1), (4, 7), (1, 32)), min=1, max=32)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return einx.id("b n d, b m d -> b ((n + m) d)", x * self.weight, x[:, 1:])


def test_a_size_that_is_a_sum_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"test_einx.py:\d+: einx makes a size"):
        compiled(Joined(), 3, min=1, max=32)


def test_einx_sees_plain_numbers_again() -> None:
    from einx._src.frontend.impl import torch as home

    compiled(Distances(), 3, min=1, max=32)
    assert "int" not in vars(home)
