"""Tables whose rows a loop over a dynamic length writes and later steps read, beside PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relax_disc.errors import ShapeRangeError
from tests.training.trained_loops import LONGEST, assert_trains_as_eager, compiled

_SIZES = ((3, 7), (1, 2), (8, LONGEST), (2, 5))


class _Table(nn.Module):
    """``[B, T, 6]`` to ``[B, T, 3]`` through a table of rows of 8."""

    table: Any

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(self.enter(x)))


class _Forward(_Table):
    """The forward algorithm of a hidden Markov model."""

    def table(self, e: Tensor) -> Tensor:
        a = torch.zeros(e.shape[0], e.shape[1], 8)
        a[:, 0] = e[:, 0]
        for t in range(1, e.shape[1]):
            a[:, t] = e[:, t] + torch.logsumexp(
                a[:, t - 1].clone()[:, :, None] + self.mix.weight, 1
            )
        return a


class _Backward(_Table):
    """From the end, along the first axis, of which the last row is read before it is written."""

    def table(self, e: Tensor) -> Tensor:
        b = e.new_zeros(e.shape[1] + 1, e.shape[0], 8)
        for t in reversed(range(e.shape[1])):
            b[t] = (self.mix(b[t + 1].clone()) + e[:, t]).tanh()
        return b[:-1].transpose(0, 1)


class _TwoBack(_Table):
    """Rows of one and of two steps before; in the first steps the table's last, as -1 says."""

    def table(self, e: Tensor) -> Tensor:
        a = torch.ones(e.shape[0], e.shape[1], 8)
        h = torch.zeros(e.shape[0], 8)
        for t in range(e.shape[1]):
            one, two = a[:, t - 1].clone(), a[:, t - 2].clone()
            h = (self.mix(one) * 0.5 + two.sin() + e[:, t] + h).tanh()
            a[:, t] = h
        return a + a[:, -1:]


class _TwoTables(_Table):
    """A table of maxima and one of sums, each of which reads both."""

    def table(self, e: Tensor) -> Tensor:
        best = torch.zeros(e.shape[0], e.shape[1], 8)
        total = torch.zeros(e.shape[0], e.shape[1])
        best[:, 0] = e[:, 0].relu()
        for t in range(1, e.shape[1]):
            before, row = total[:, t - 1].clone(), best[:, t - 1].clone()
            total[:, t] = 0.5 * before + row.tanh().mean(1)
            best[:, t] = torch.maximum(0.5 * row, self.mix(e[:, t])) + before[:, None]
        return best * total[..., None].tanh()


@pytest.mark.parametrize("kind", [_Forward, _Backward, _TwoBack, _TwoTables])
def test_later_steps_read_what_steps_wrote(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(kind(), lambda ps: torch.optim.SGD(ps, lr=0.05), _SIZES, least=2)


class _ReadsAhead(_Table):
    def table(self, e: Tensor) -> Tensor:
        a = torch.zeros(e.shape[0], e.shape[1] + 1, 8)
        for t in range(e.shape[1]):
            a[:, t] = self.mix(a[:, t + 1]) + e[:, t]
        return a[:, :-1]


class _ChangesWhatItWrote(_Table):
    def table(self, e: Tensor) -> Tensor:
        a = torch.zeros(e.shape[0], e.shape[1], 8)
        for t in range(1, e.shape[1]):
            h = self.mix(a[:, t - 1]) + e[:, t]
            a[:, t] = h
            h += 1
        return a


class _ReadsEveryOther(_Table):
    def table(self, e: Tensor) -> Tensor:
        a = torch.zeros(e.shape[0], e.shape[1] * 2, 8)
        for t in range(1, e.shape[1]):
            a[:, 2 * t] = self.mix(a[:, t]) + e[:, t]
        return a[:, ::2]


@pytest.mark.parametrize("kind", [_ReadsAhead, _ChangesWhatItWrote, _ReadsEveryOther])
def test_other_rows_of_the_table_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ShapeRangeError, match=r"cannot be run as one step: it (reads|writes)"):
        compiled(kind(), lambda ps: torch.optim.SGD(ps, lr=0.05), least=2)
