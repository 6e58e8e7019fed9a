"""Python loops over a dynamic length whose first or last step differs from the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from relax_disc.errors import ShapeRangeError
from tests.tiers import every
from tests.training.trained_loops import LONGEST, assert_trains_as_eager, compiled


class _Decoder(nn.Module):
    """``[B, T, 6]`` to ``[B, T, 3]`` by a loop that a subclass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(6, 8)
        self.first = nn.Linear(6, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class FirstByNumber(_Decoder):
    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for t in range(x.shape[1]):
            if t == 0:
                h = self.first(x[:, t]).tanh()
            else:
                h = self.cell(x[:, t], h)
            outs.append(self.out(h))
        return torch.stack(outs, 1) + h.mean()


class WritesAndLooksBack(_Decoder):
    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 8)
        out = x.new_zeros(x.shape[0], x.shape[1], 3)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            if t > 0:
                h = h + 0.5 * self.first(x[:, t - 1])
            out[:, t] = self.out(h)
        return out


class NothingBefore(_Decoder):
    """A state that is None before the first step, and a tuple that the cell makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 8)
        self.second = nn.LSTMCell(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        state, previous, outs = None, None, []
        for row in x.unbind(1):
            state = self.cell(row, state)
            if previous is not None:
                row = row + previous.mean()
            previous, _ = self.second(row, state)
            outs.append(self.out(previous))
        return torch.stack(outs, 1)


class LastByNumber(_Decoder):
    def forward(self, x: Tensor) -> Tensor:
        h, outs = x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            if t < x.shape[1] - 1:
                h = functional.dropout(h, 0.0) * 0.5
            outs.append(self.out(h))
        return torch.stack(outs, 1)


class BackwardsFromTheLast(_Decoder):
    def forward(self, x: Tensor) -> Tensor:
        length, h, outs = x.shape[1], None, []
        for t in reversed(range(length)):
            h = self.first(x[:, t]) if t == length - 1 else self.cell(x[:, t], h)
            outs.append(self.out(h))
        return torch.stack(outs[::-1], 1)


class InAComprehension(_Decoder):
    def forward(self, x: Tensor) -> Tensor:
        zero = x.new_zeros(x.shape[0], 8)
        outs = [
            self.first(row) if t == 0 else self.cell(row, zero) for t, row in enumerate(x.unbind(1))
        ]
        return self.out(torch.stack(outs, 1))


class Attends(_Decoder):
    """The decoder of PyTorch's tutorial on translation, by layers that run one step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(6, 8, batch_first=True)
        self.layers = nn.GRU(14, 8, num_layers=2, batch_first=True)
        self.plain = nn.RNN(8, 8, nonlinearity="relu")
        self.query, self.key, self.score = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def step(self, row: Tensor, state: Any, encoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.score(torch.tanh(self.query(state[-1:].permute(1, 0, 2)) + self.key(encoded)))
        weights = functional.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
        out, state = self.layers(torch.cat((row, torch.bmm(weights, encoded)), dim=2), state)
        return out, state, weights

    def forward(self, x: Tensor) -> Tensor:
        encoded, (state, _) = self.encoder(x)
        state = state.repeat(2, 1, 1)
        row, outs, seen = torch.zeros(x.shape[0], 1, 6), [], []
        for t in range(x.shape[1]):
            made, state, weights = self.step(row, state, encoded)
            again, _ = self.plain(made.transpose(0, 1))
            outs.append(self.out(made + again.transpose(0, 1)))
            seen.append(weights)
            row = x[:, t].unsqueeze(1)
        return torch.cat(outs, 1) + torch.cat(seen, 1).square().mean()


_ONE = (LastByNumber, Attends, NothingBefore)
"""They train at a length of 1 too: no parameter is read by steps in the middle alone."""
_TWO = (FirstByNumber, WritesAndLooksBack, InAComprehension, BackwardsFromTheLast)


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "least"),
    every(3, [pytest.param(kind, 1) for kind in _ONE] + [pytest.param(kind, 2) for kind in _TWO]),
)
def test_a_step_that_differs_is_taken_by_itself(kind: type[_Decoder], least: int) -> None:
    torch.manual_seed(0)
    sizes = ((4, 6), (1, least), (8, LONGEST), (3, 2), (2, least), (5, 7))
    assert_trains_as_eager(kind(), _optimizer, sizes, least)


@pytest.mark.parametrize("kind", every(3, _TWO))
def test_lengths_at_which_parameters_get_no_gradient_are_refused(kind: type[_Decoder]) -> None:
    step = compiled(kind(), _optimizer)
    with pytest.raises(ShapeRangeError, match=r"length=1: the model trains model\.\w+\."):
        step(torch.randn(2, 1, 6), torch.randn(2, 1, 3))
    assert step(torch.randn(2, 2, 6), torch.randn(2, 2, 3)).isfinite()


class ReadsAfter(_Decoder):
    def forward(self, x: Tensor) -> Tensor:
        h, outs = x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            before, h = h, self.cell(x[:, t], h)
            if t > 0:
                change = h - before
            outs.append(self.out(h))
        return torch.stack(outs, 1) + change.mean()


class EverySecond(_Decoder):
    def forward(self, x: Tensor) -> Tensor:
        h, outs = x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            if t % 2 == 0:
                h = h * 0.5
            outs.append(self.out(h))
        return torch.stack(outs, 1)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ReadsAfter, "what only a step knows is read after the loop"),  # eager PyTorch raises at 1
        (EverySecond, "the model decides from data"),
    ],
)
def test_other_differences_are_refused_with_the_reason(kind: type[_Decoder], why: str) -> None:
    with pytest.raises(ShapeRangeError, match=f"cannot be run as one step: .*{why}"):
        compiled(kind(), _optimizer)
