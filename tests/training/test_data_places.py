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


class Queue(nn.Module):
    """Contrasts with keys of batches before, as MoCo does, and reads the last ones by a slice."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(4, 5), nn.Linear(4, 5)
        self.register_buffer("queue", torch.randn(5, 24))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> Tensor:
        rows, place = keys.shape[0], int(self.place)
        before = self.queue[:, place : place + rows].mean()
        self.queue[:, place : place + rows] = keys.T
        self.place[0] = (place + rows) % self.queue.shape[1]
        return before

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for one, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                other.mul_(0.9).add_(one, alpha=0.1)
            keys = self.key(x)
        scores = self.query(x) @ self.queue.clone().detach()
        return scores.logsumexp(1).mean() * (2 + self.enqueue(keys).tanh())


class Written(nn.Module):
    """Writes where a number says that was taken out before the region that writes."""

    held: Tensor

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(3, 3), write
        self.register_buffer("held", torch.arange(24.0).reshape(3, 8))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        hidden, number = self.layer(x), int(place)
        with torch.no_grad():
            self.write(self.held, number, x)
        return (hidden * self.held.sum()).square().mean()


def to_the_end(held: Tensor, place: int, x: Tensor) -> None:
    held[..., place : place + x.shape[0]] = x.T


def through_a_view(held: Tensor, place: int, x: Tensor) -> None:
    held.t()[place : place + x.shape[0]] = x


def one_of_them(held: Tensor, place: int, x: Tensor) -> None:
    held[:, place] = x[0]
    held[:, place : place + 1] += 2.0


def a_factor(held: Tensor, place: int, x: Tensor) -> None:
    held.mul_(1 + place).add_(place)


@pytest.mark.parametrize("write", [to_the_end, through_a_view, one_of_them, a_factor])
def test_writes_by_numbers_from_outside_of_their_region_stay(write: Any) -> None:
    model = Written(write)
    eager = copy.deepcopy(model)
    shapes = {0: Dim("rows", min=1, max=4)}, None
    example = torch.randn(2, 3), torch.tensor(1)
    step = relax_disc.compile(model, None, example, dynamic_shapes=shapes)
    for rows, place in ((2, 1), (1, 7), (4, 0), (3, 5)):
        batch = torch.randn(rows, 3), torch.tensor(place)
        torch.testing.assert_close(step(*batch, update=False), eager(*batch).detach())
        torch.testing.assert_close(model.held, eager.held)


def test_a_queue_is_written_from_a_place_that_a_buffer_holds() -> None:
    model = Queue()
    model.key.requires_grad_(False)
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.query.parameters(), 0.1) for m in (model, eager)]
    shapes = ({0: Dim("rows", min=1, max=16)},)
    step = relax_disc.compile(model, optimizers[0], (torch.randn(8, 4),), dynamic_shapes=shapes)
    for rows in (8, 8, 8, 1, 16, 4):
        x = torch.randn(rows, 4)
        expected = eager(x)
        optimizers[1].zero_grad()
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(x), expected.detach())
        torch.testing.assert_close(dict(model.state_dict()), dict(eager.state_dict()))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="do not all lie on axis 1"):
        step(torch.randn(16, 4))  # of 24 places there are 3 left
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
