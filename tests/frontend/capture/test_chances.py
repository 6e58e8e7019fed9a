"""Branches on a random number, as LayerDrop has: those of a chance of 0 or 1 go one way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import RelaxDiscError, UnsupportedOperatorError

Asks = Callable[[Any], Any]
WAYS: dict[str, Asks] = {
    "more": lambda p: torch.rand(1) > p,
    "less": lambda p: torch.rand([]) < p,
    "not more": lambda p: torch.rand(()).le(p),
    "not less": lambda p: torch.ge(torch.rand(1), p),
    "reversed": lambda p: p < torch.rand(1),
    "not": lambda p: not torch.rand(1) < p,
}


class Dropped(nn.Module):
    """A layer that is left out by chance."""

    def __init__(self, asks: Asks, chance: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.asks, self.chance = asks, chance

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.asks(self.chance):
            x = x + self.second(x)
        return x.square().mean()


def compiled(model: nn.Module) -> Any:
    dims = ({0: Dim("n", min=1, max=9)},)
    return relax_disc.compile(model, None, (torch.ones(3, 4),), dynamic_shapes=dims)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chance", [0.0, 1.0, 0, 1])
def test_a_certain_branch_is_that_of_eager(way: str, chance: float) -> None:
    torch.manual_seed(0)
    model = Dropped(WAYS[way], chance)
    eager = copy.deepcopy(model)
    step = compiled(model)
    for rows in (5, 1, 9):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(step(x, update=False), eager(x).detach())


def test_a_branch_by_chance_is_refused_with_what_to_do() -> None:
    said = r"test_chances.py:\d+: a branch on whether a random .* below 0.25: .*Set the chance to"
    with pytest.raises(UnsupportedOperatorError, match=said):
        compiled(Dropped(WAYS["less"], 0.25))


def test_a_chance_that_changes_is_refused() -> None:
    model = Dropped(WAYS["less"], 0.0)
    step = compiled(model)
    step(torch.ones(3, 4), update=False)
    model.chance = 0.5
    with pytest.raises(RelaxDiscError, match=r"chance was 0\.0"):
        step(torch.ones(3, 4), update=False)


def test_other_random_truths_are_refused_as_ever() -> None:
    with pytest.raises(UnsupportedOperatorError, match="decides from data"):
        compiled(Dropped(lambda p: torch.rand(2).mean() < p, 0.0))
