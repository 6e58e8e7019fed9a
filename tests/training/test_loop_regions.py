"""Regions without gradients in and around a Python loop over a dynamic length, and returns of RL.

The losses are chosen so that a gradient that goes through such a region would be another one.
"""

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


class _Model(nn.Module):
    """``[B, T, 6]`` to ``[B, T, 3]`` by a loop that a subclass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)
        self.again = nn.Linear(3, 6)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class ReadsItsOwnAnswer(_Model):
    """A decoder that is fed what it said, through which no gradient goes."""

    def forward(self, x: Tensor) -> Tensor:
        h, said, outs = x.new_zeros(x.shape[0], 8), x.new_zeros(x.shape[0], 3), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t] + self.again(said), h)
            outs.append(self.out(h))
            with torch.no_grad():
                best = outs[-1].argmax(-1)
                said = functional.one_hot(best, 3).to(x.dtype) * outs[-1].softmax(-1)
        return torch.stack(outs, 1)


class RegionsInRegions(_Model):
    """Memory of its own is written inside; gradients are on again further in, and then lost."""

    def forward(self, x: Tensor) -> Tensor:
        h, outs = x.new_zeros(x.shape[0], 8), []
        for row in x.unbind(1):
            with torch.no_grad():
                norm, kept = self.scaled(h, row), h[:, :6]
            with torch.enable_grad():
                h = self.cell(row + norm + kept, h)
            outs.append(self.out(h))
        return torch.stack(outs, 1)

    def scaled(self, h: Tensor, row: Tensor) -> Tensor:
        norm = torch.zeros_like(row)
        norm[:, :3] = self.out(h)
        with torch.enable_grad():
            return norm + self.again(self.out(h))


class Advantages(_Model):
    """Generalized advantage estimation (arXiv 1506.02438), from the last step to the first."""

    def forward(self, x: Tensor) -> Tensor:
        values = self.out(functional.pad(x, (0, 2)))
        steps, last = x.shape[1], x.new_zeros(x.shape[0], 3)
        with torch.no_grad():
            made = torch.zeros_like(values)
            for t in reversed(range(steps)):
                following = x[:, t, 3:] if t == steps - 1 else values[:, t + 1]
                delta = x[:, t, :3] + 0.9 * following - values[:, t]
                made[:, t] = last = delta + 0.9 * 0.95 * last
        return values - made - values.detach()


class GrowsInFront(_Model):
    """Returns, each put before those of the later steps, in tuples and alone."""

    def forward(self, x: Tensor) -> Tensor:
        rewards, total, returns, pairs = (
            self.again(self.out(functional.pad(x, (0, 2)))),
            0.0,
            [],
            [],
        )
        end = [x[:, 0]]
        for t in range(x.shape[1] - 1, -1, -1):
            total = rewards[:, t] + 0.9 * total
            returns.insert(0, total)
            pairs.insert(0, (total / (t + 1), rewards[:, t]))
            end.insert(0, total.tanh())
        weighted = torch.stack([a + b for a, b in pairs], 1)
        made = torch.stack(returns, 1) + weighted + torch.stack(end[1:], 1)
        return made[:, :, :3] * x[:, :, 3:] + returns[0][:, None, 3:]


_TRAIN = (ReadsItsOwnAnswer, Advantages, RegionsInRegions, GrowsInFront)


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@pytest.mark.parametrize("kind", every(2, _TRAIN))
def test_what_a_region_gives_back_has_no_gradient(kind: type[_Model]) -> None:
    torch.manual_seed(0)
    sizes = ((3, 7), (1, 1), (2, 2), (8, LONGEST), (8, 1))
    assert_trains_as_eager(kind(), _optimizer, sizes)


class WritesOutside(_Model):
    def forward(self, x: Tensor) -> Tensor:
        made = x.new_zeros(x.shape[0], x.shape[1], 3)
        for t in range(x.shape[1]):
            with torch.no_grad():
                made[:, t] = self.out(self.cell(x[:, t]))
        return made + self.out(self.cell(x[:, 0]))[:, None]


class GrowsAtBothEnds(_Model):
    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for row in x.unbind(1):
            made.append(row)
            made.insert(0, row)
        return torch.stack(made, 1)[:, ::2, :3] * self.out.weight.sum()


class GrowsInTheMiddle(_Model):
    def forward(self, x: Tensor) -> Tensor:
        made = [x[:, 0], x[:, 0]]
        for row in x.unbind(1):
            made.insert(1, row)
        return torch.stack(made[1:-1], 1)[:, :, :3] * self.out.weight.sum()


class ReadsTheLastOfAll(_Model):
    def forward(self, x: Tensor) -> Tensor:
        made = [x[:, 0]]
        for row in x.unbind(1):
            made.insert(0, row + made[-1])
        return torch.stack(made[:-1], 1)[:, :, :3] * self.out.weight.sum()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (WritesOutside, "it writes into a tensor in a region of its own"),
        (GrowsAtBothEnds, "it puts values in front of made and behind"),
        (GrowsInTheMiddle, r"it calls made.insert\(\)"),
        (ReadsTheLastOfAll, "it reads made, which it appends to"),
    ],
)
def test_other_regions_and_lists_are_refused_with_the_reason(kind: type[Any], why: str) -> None:
    with pytest.raises(ShapeRangeError, match=why):
        compiled(kind(), _optimizer)
