"""Places that only data tell, ``x[:, i]``: picked and written as in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import IndexRangeError, UnsupportedOperatorError
from tests.tiers import every
from tests.training.beside_eager import assert_trains_as_eager

SIZES = ((4, 9), (1, 1), (3, 12), (2, 2))


class _Model(nn.Module):
    """A loss of what a function makes of states, ``[B, T, 6]``, the input and a place of it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor, place: Any) -> Tensor:
        return self.function(self.layer(x), x, place).square().mean()


def greatest(h: Tensor, x: Tensor, place: Any) -> Tensor:
    return h[:, x[0, :, 0].argmax()]


def from_the_end(h: Tensor, x: Tensor, place: Any) -> Tensor:
    return h[:, -place - 1, None] * h + h[place % h.shape[0]][None]


def the_best_two(h: Tensor, x: Tensor, place: Any) -> Tensor:
    """As Autoformer adds up delayed series."""
    values, places = x.mean((0, 2)).topk(min(2, 1))
    made = torch.zeros_like(h)
    for k in range(1):
        shift = int(places[k])
        made = made + torch.roll(h, -shift, 1) * values[k] + h[:, places[k]][:, None]
    return made


def beside_other_indices(h: Tensor, x: Tensor, place: Any) -> Tensor:
    rows = torch.arange(h.shape[0])
    return h[rows, place] + h[..., place, :] + h.select(1, place) + h.index_select(1, place)[:, 0]


def numbers(h: Tensor, x: Tensor, place: Any) -> Tensor:
    i: Any = place.item()
    return h[:, i] - h[:, (i + 1) % h.shape[1]] * i


def written(h: Tensor, x: Tensor, place: Any) -> Tensor:
    h = h.clone()
    h[:, place] = 2 * h[:, 0]
    h[0, place, 2:4] = 1.0
    h[:, place, 1] = x[:, 0, 1]
    return h


def added_to(h: Tensor, x: Tensor, place: Any) -> Tensor:
    h = h.clone()
    h[:, place] += 1
    h[:, place, 2:] *= x[:, :1, 0]
    h[0, place] -= h[0, 0]
    return h


def in_steps(h: Tensor, x: Tensor, place: Any) -> Tensor:
    """Reads at a place in each step of a loop over the length."""
    state, outs = h[:, 0], []
    for t in range(h.shape[1]):
        state = torch.tanh(state + h[:, t] * h[:, place])
        outs.append(state)
    return torch.stack(outs, 1)


_FUNCTIONS = (greatest, from_the_end, the_best_two, beside_other_indices, numbers, written)
_FUNCTIONS += (added_to, in_steps)


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def _compiled(model: nn.Module) -> Any:
    shape = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=16)}
    optimizer = _optimizer(model.parameters())
    example = torch.randn(3, 7, 6), torch.tensor(2)
    return relax_disc.compile(model, optimizer, example, dynamic_shapes=(shape, None))


@pytest.mark.parametrize("function", every(4, _FUNCTIONS), ids=lambda f: f.__name__)
def test_places_are_read_and_written_as_in_eager(function: Any) -> None:
    torch.manual_seed(0)
    batches = (
        ((batch, length), (torch.randn(batch, length, 6), torch.tensor(place)))
        for batch, length in SIZES
        for place in {0, length // 2, length - 1}
    )
    assert_trains_as_eager(_compiled(_Model(function)), _optimizer, batches)


@pytest.mark.parametrize("function", [greatest, added_to], ids=lambda f: f.__name__)
def test_a_place_that_is_not_there_is_refused_before_anything_is_written(function: Any) -> None:
    model = _Model(lambda h, x, place: function(h, x, place).sum() + h[:, place].sum())
    step = _compiled(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IndexRangeError, match="place"):
        step(torch.randn(2, 5, 6), torch.tensor(5))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert step(torch.randn(2, 5, 6), torch.tensor(-5)).isfinite()


def _into_a_view(h: Tensor, x: Tensor, place: Any) -> Tensor:
    h = h.clone()
    row = h[:, place]
    row += 1
    return h


def _into_a_part(h: Tensor, x: Tensor, place: Any) -> Tensor:
    h = h.clone()
    h[0, place].mul_(3.0)
    return h


def _a_view_of_what_changes(h: Tensor, x: Tensor, place: Any) -> Tensor:
    h = h.clone()
    row = h[:, place]
    h.mul_(2.0)
    return h + row[:, None]


@pytest.mark.parametrize("function", [_into_a_view, _into_a_part, _a_view_of_what_changes])
def test_what_a_view_would_show_is_refused(function: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"test_data_places.py:\d+: .* is a copy"):
        _compiled(_Model(function))
    with pytest.raises(UnsupportedOperatorError, match="is a copy"):  # and once more
        _compiled(_Model(function))
