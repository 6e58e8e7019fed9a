"""Attributes that each step of a loop over a dynamic length sets, beside eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relax_disc.errors import RelaxDiscWarning, ShapeRangeError
from tests.training.trained_loops import LONGEST, assert_trains_as_eager, compiled

_SIZES = ((3, 7), (1, 1), (8, LONGEST), (2, 5))


class _Attention(nn.Module):
    """Keeps its weights to be shown, as d2l's and many others do."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 6)
        self.weights: Any = None

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        self.weights = (self.query(h)[:, None] * x).sum(-1).softmax(-1)
        return (self.weights[..., None] * x).sum(1)


class _Decoder(nn.Module):
    """Two attentions, whose weights the steps and the loss read after they were set."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = _Attention(), _Attention()
        self.cell, self.out = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 8)
        outs = []
        for t in range(x.shape[1]):
            seen = self.one(h, x) - self.other(h, x)
            h = self.cell(seen + x[:, t], h) * (1 + self.one.weights.max(1, keepdim=True)[0])
            self.last = h
            outs.append(self.out(h))
        shown = self.other.weights.square().sum(1).mean() + self.last.mean()
        return torch.stack(outs, 1) + shown


class _Cell(nn.Module):
    """Keeps its state by itself; it is None before the first step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, 8)
        self.h: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.h is None:
            self.h = x.new_zeros(x.shape[0], 8)
        self.h = self.cell(x, self.h)
        return self.h


class _Stateful(nn.Module):
    """Cells that keep their states, one before which the loop sets it, in a comprehension too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = _Cell(6), _Cell(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.first.h = self.second.h = None
        outs = []
        for t in range(x.shape[1]):
            outs.append(self.second(self.first(x[:, t])))
        self.first.h = x.new_ones(x.shape[0], 8)
        again = torch.stack([self.first(row) for row in x.unbind(1)], 1)
        return self.out(torch.stack(outs, 1) + again) + self.first.h.mean()


@pytest.mark.parametrize("kind", [_Decoder, _Stateful])
def test_what_steps_set_is_as_in_eager_pytorch(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    with pytest.warns(RelaxDiscWarning, match="is changed by the model"):
        assert_trains_as_eager(kind(), lambda ps: torch.optim.SGD(ps, lr=0.05), _SIZES)


class _Masked(nn.Module):
    """Parts of one length, of which each step multiplies with weights as wide as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out, self.mixed = nn.GRUCell(6, 8), nn.Linear(8, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 8)
        around = nn.functional.pad(x, (0, 0, 1, 1))
        outs = []
        for t in range(x.shape[1]):
            mask = (x[:, t : t + 1] > 0).float().mean(2)
            near = around[:, t : t + 3].transpose(1, 2)
            h = mask * self.cell(self.mixed(near)[..., 0], h) + (1 - mask) * h
            h = torch.where(x[..., t : t + 1, 0] > 0.5, h.tanh(), h)
            outs.append(self.out(h))
        return torch.stack(outs, 1)


def test_parts_of_one_length_are_as_wide_as_they_say() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(_Masked(), lambda ps: torch.optim.SGD(ps, lr=0.05), _SIZES)


class _ReadsNothing(nn.Module):
    """Makes lists that no one reads, as losses that choose between ways do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        _ = [row.sum() for row in hidden]
        last = None
        for row in hidden.unbind(1):
            last = row.square().sum()
        del last
        return self.out(hidden)


def test_a_list_that_no_one_reads_is_not_made() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(_ReadsNothing(), lambda ps: torch.optim.SGD(ps, lr=0.05), _SIZES)


class _LastOfEach(nn.Module):
    """Keeps the state at each sequence's own last position, by a mask on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def run(self, x: Tensor, last: Tensor) -> Tensor:
        lengths = (x[:, :, 0] > 0).sum(1).clamp_min(1)
        h = x.new_zeros(x.shape[0], 8)
        outs = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            last[lengths - 1 == t] = h[lengths - 1 == t]
            outs.append(self.out(h))
        return torch.stack(outs, 1)

    def forward(self, x: Tensor) -> Tensor:
        last = x.new_full((x.shape[0], 8), 0.5)
        return self.run(x, last) + self.out(last)[:, None]


class _LastBySeveralNames(_LastOfEach):
    def run(self, x: Tensor, last: Tensor) -> Tensor:
        h = last
        for t in range(x.shape[1]):
            new = self.cell(x[:, t], h)
            last[x[:, t, 0] > 0] = new[x[:, t, 0] > 0]
        return self.out(h)[:, None].expand(-1, x.shape[1], -1)


class _LastInADict(_LastOfEach):
    def run(self, x: Tensor, last: Tensor) -> Tensor:
        state = {"h": last}
        for t in range(x.shape[1]):
            new = self.cell(x[:, t], state["h"])
            last[x[:, t, 0] > 0] = new[x[:, t, 0] > 0]
        return self.out(last)[:, None].expand(-1, x.shape[1], -1)


class _LastInAnAttribute(_LastOfEach):
    def run(self, x: Tensor, last: Tensor) -> Tensor:
        self.state = last
        for t in range(x.shape[1]):
            new = self.cell(x[:, t], self.state)
            last[x[:, t, 0] > 0] = new[x[:, t, 0] > 0]
        return self.out(last)[:, None].expand(-1, x.shape[1], -1)


def test_rows_that_a_mask_writes_into_others() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(_LastOfEach(), lambda ps: torch.optim.SGD(ps, lr=0.05), _SIZES)


@pytest.mark.parametrize("kind", [_LastBySeveralNames, _LastInADict, _LastInAnAttribute])
def test_rows_that_a_mask_writes_into_what_has_another_name(kind: type[nn.Module]) -> None:
    with pytest.raises(ShapeRangeError, match=r"by a mask into last, which .* is too"):
        compiled(kind(), lambda ps: torch.optim.SGD(ps, lr=0.05))
