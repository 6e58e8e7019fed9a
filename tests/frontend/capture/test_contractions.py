"""Products of several tensors, whose order a planner of contractions chooses."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor, nn
from torch.backends import opt_einsum

from tests.frontend.capture.squares import assert_trains_as_eager


class Contracted(nn.Module):
    """Low-rank products, in each form of ``torch.einsum``."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.Parameter(0.3 * torch.randn(shape)) for shape in ((4, 2), (2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        by_text = torch.einsum("btd,dr,re->bte", x, self.down, self.up)
        by_list = torch.einsum("btd,dr,re->bte", [x, self.down, self.up])
        operands = x, [0, 1, 2], self.down, [2, 3], self.up, [3, 4], [0, 1, 4]
        return by_text + by_list * torch.einsum(*operands)


def plan(equation: str, *shapes: object, **options: object) -> object:
    """Contract the last two operands first; only plain numbers are sizes."""
    assert options == {"shapes": True, "optimize": opt_einsum.strategy}
    assert all(type(size) is int for shape in shapes for size in shape)  # type: ignore
    planned.append(equation)
    return [(1, 2), (0, 1)], "as opt_einsum describes it"


planned: list[str] = []


@pytest.mark.parametrize("is_enabled", [True, False])
def test_several_operands(is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = opt_einsum.m  # type: ignore  # behind its properties
    monkeypatch.setattr(module, "_opt_einsum", types.SimpleNamespace(contract_path=plan))
    monkeypatch.setattr(module, "enabled", is_enabled)
    planned.clear()
    torch.manual_seed(0)
    assert_trains_as_eager(Contracted(), 4, [(1, 1), (4, 20), (3, 12)], min=1, max=20)
    assert bool(planned) == is_enabled
