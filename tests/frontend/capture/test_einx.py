"""einx, which takes sizes as plain numbers, inside a model of symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
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


class Picked(nn.Module):
    """Picks rows of a table and elements of what another tensor of the same dims names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        places = (x[..., 0].detach().abs() * 3).long().clamp_max(6)
        rows = einx.get_at("[c] d, b n -> b n d", self.table, places)
        return x * rows + einx.get_at("b n [l], b n -> b n", x, places % 3)[..., None]


def test_einx_picks_by_places_at_every_size() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(Picked(), 3, ((3, 12), (1, 1), (4, 7), (1, 32)), min=1, max=32)


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


class PickedByAnother(nn.Module):
    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return einx.get_at("b n [l], b n -> b n", x, places).square().mean()


def test_two_tensors_of_the_same_dims() -> None:
    rows, length = Dim("rows", min=1, max=9), Dim("length", min=1, max=32)
    model = nn.ModuleDict({"layer": nn.Linear(3, 3), "pick": PickedByAnother()})
    batch = torch.randn(2, 5, 3), torch.randint(3, (2, 5))
    step = relax_disc.compile(
        model,
        None,
        batch,
        dynamic_shapes=({0: rows, 1: length},) * 2,
        loss_fn=lambda m, x, places: m["pick"](m["layer"](x), places),
    )
    for size in ((2, 5), (1, 1), (9, 32)):
        x, places = torch.randn(*size, 3), torch.randint(3, size)
        expected = model["pick"](model["layer"](x), places)
        torch.testing.assert_close(step(x, places, update=False), expected.detach())
