"""Loops that write a variable in place, as ``h += x`` does, of which there are other names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relax_disc.errors import ShapeRangeError
from tests.training.trained_loops import Recurrent, assert_trains_as_eager, compiled


class AddsToAView(Recurrent):
    """A row of a tensor that is read behind the loop."""

    def run(self, x: Tensor) -> Tensor:
        states = self.cell(x[:, 0]).new_zeros(2, x.shape[0], 8) + self.out.bias.sum()
        first = states[0]
        for t in range(x.shape[1]):
            first += self.cell(x[:, t])
        return states.mean(0)[:, None].expand(-1, x.shape[1], -1)


class ListHoldsIt(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0], 8)
        kept = [total, total[:1]]
        for t in range(x.shape[1]):
            total += self.cell(x[:, t])
        return (kept[0] + kept[1])[:, None].expand(-1, x.shape[1], -1)


class CallerHoldsIt(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0], 8)
        added = self.add_up(x, total)
        return (total * 2 + added)[:, None].expand(-1, x.shape[1], -1)

    def add_up(self, x: Tensor, total: Tensor) -> Tensor:
        for t in range(x.shape[1]):
            total += self.cell(x[:, t], total.clone())
        return total


class NobodyElseHoldsIt(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        total: Any = 0.0
        mean = x.mean(1)
        for t in range(x.shape[1]):
            total += self.cell(x[:, t] + mean)
            mean += x[:, t].detach() / x.shape[1]
        return (total + mean.sum(-1, True))[:, None].expand(-1, x.shape[1], -1)


class HeldInATuple(Recurrent):
    """As states of two parts are kept, of which there is another name."""

    def run(self, x: Tensor) -> Tensor:
        first = x.new_zeros(x.shape[0], 8)
        state = (first, x.new_zeros(x.shape[0], 8))
        for t in range(x.shape[1]):
            h, c = state
            h += self.cell(x[:, t])
            c += h.detach().tanh()
            state = (h, c)
        return (first + state[1])[:, None].expand(-1, x.shape[1], -1)


class FirstStepAloneWrites(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        first = x.new_zeros(x.shape[0], 8)
        h = first
        for t in range(x.shape[1]):
            h += self.cell(x[:, t]).detach()
            h = self.second(h.clone()) * 1.0
        return (first + h)[:, None].expand(-1, x.shape[1], -1)


class AppendsIt(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        total, outs = x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            total += self.cell(x[:, t])
            outs.append(total)
        return torch.stack(outs, 1)


class AddsToABuffer(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(6))

    def run(self, x: Tensor) -> Tensor:
        seen, outs = self.seen, []
        for t in range(x.shape[1]):
            seen += x[:, t].mean(0)
            outs.append(self.cell(x[:, t]))
        return torch.stack(outs, 1)


class AddsToTheFirstOfTwo(Recurrent):
    """Of two objects of one class, whose attributes a step may read."""

    def __init__(self) -> None:
        super().__init__()
        self.meters = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(2))

    def run(self, x: Tensor) -> Tensor:
        seen: Any = self.meters[0].running_mean
        outs = []
        for t in range(x.shape[1]):
            seen += x[:, t].mean(0)
            outs.append(self.cell(x[:, t]))
        return torch.stack(outs, 1)


class StepsReadTheOther(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        total, outs = x.new_zeros(x.shape[0], 8), []
        same = total
        for t in range(x.shape[1]):
            total += self.cell(x[:, t]).detach()
            outs.append(self.cell(x[:, t], same.clone()))
        return torch.stack(outs, 1)


class WritesTheLastBehind(Recurrent):
    """The list holds it, too."""

    def run(self, x: Tensor) -> Tensor:
        h, outs = x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outs.append(h)
        h[:, 0] = 0
        return torch.stack(outs, 1)


class WritesAnotherNameBehind(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        h = other = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            other = h[:, :4]
        h.mul_(2)
        return other.repeat(1, 2)[:, None].expand(-1, x.shape[1], -1)


class WritesAPartOfASequence(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        y, last, outs = x * 2, x[:, 0], []
        for t in range(x.shape[1]):
            last = y[:, t]
            outs.append(self.cell(last))
        last.mul_(3)
        return torch.stack(outs, 1) + y.sum(2, True)


class WritesWhatNobodySharesBehind(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        h, outs = x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h) * 2
            outs.append(h.clone())
        h[:, 0] = 0
        made = torch.stack(outs, 1)
        made += h[:, None]
        return made


KINDS = [
    AddsToAView,
    ListHoldsIt,
    CallerHoldsIt,
    NobodyElseHoldsIt,
    HeldInATuple,
    FirstStepAloneWrites,
    WritesWhatNobodySharesBehind,
]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_other_names_see_what_was_written(kind: type[Recurrent]) -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(kind(), sgd, [(4, 12), (1, 1), (3, 7)])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (AddsToABuffer, r"writes into seen in place, which an attribute of AddsToABuffer is too"),
        (AddsToTheFirstOfTwo, r"seen in place, which an attribute of BatchNorm1d is too"),
        (AppendsIt, r"appends total to outs .* append total\.clone\(\)"),
        (WritesTheLastBehind, "leaves one tensor by two names"),
        (WritesAnotherNameBehind, "leaves one tensor by two names"),
        (WritesAPartOfASequence, "leaves one tensor by two names"),
        (StepsReadTheOther, r"writes into total in place, which same is too: write `total = total"),
    ],
)
def test_what_steps_may_read_by_another_name_is_refused(kind: type[Recurrent], said: str) -> None:
    with pytest.raises(ShapeRangeError, match=said):
        compiled(kind(), sgd)
