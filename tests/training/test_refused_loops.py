"""Python loops over a dynamic length that are no step: refused, with the reason."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relax_disc.errors import ShapeRangeError
from tests.training.trained_loops import Recurrent, compiled


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _compiled(model: nn.Module) -> Any:
    return compiled(model, _optimizer)


class CountsOutside(Recurrent):
    def one(self, x: Tensor) -> Tensor:
        self.number = self.number + 1
        return self.cell(x) / self.number

    def run(self, x: Tensor) -> Tensor:
        self.number = 0
        outs = []
        for t in range(x.shape[1]):
            outs.append(self.one(x[:, t]))
        return torch.stack(outs, 1)


class AppendsOutside(Recurrent):
    def one(self, x: Tensor) -> Tensor:
        self.rows.append(self.cell(x))
        return self.rows[-1]

    def run(self, x: Tensor) -> Tensor:
        self.rows = []
        outs = []
        for t in range(x.shape[1]):
            outs.append(self.one(x[:, t]))
        return torch.stack(outs, 1)


class SetsOutsideSometimes(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        outs = []
        for t in range(x.shape[1]):
            outs.append(self.cell(x[:, t]))
            holder = self if t == 0 else nn.Identity()
            holder.last = outs[-1]
        return torch.stack(outs, 1)


class SetsGlobals(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        outs = []
        for t in range(x.shape[1]):
            outs.append(self.cell(x[:, t]))
            nn.last_of_all = outs[-1]  # pyright: ignore[reportAttributeAccessIssue]
        return torch.stack(outs, 1)


class ReadsItsFirst(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        outs = [torch.zeros(x.shape[0], 8)]
        for t in range(x.shape[1]):
            outs.append(self.cell(x[:, t], outs[0]))
        return torch.stack(outs[1:], 1)


class Counts(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        h, k = torch.zeros(x.shape[0], 8), 0
        outs = []
        for t in range(x.shape[1]):
            k = k + 1
            h = self.cell(x[:, t], h) * k
            outs.append(h)
        return torch.stack(outs, 1)


class AppendsNumbers(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        outs = [(self.cell(row), number) for number, row in enumerate(x.unbind(1))]
        return torch.stack([h for h, _ in outs], 1)


class ReadsThePast(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        return torch.stack([self.cell(x[:, : t + 1].mean(1)) for t in range(x.shape[1])], 1)


class Nested(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        outs = []
        for t in range(x.shape[1]):
            h = torch.zeros(x.shape[0], 8)
            for other in range(x.shape[1]):
                h = self.cell(x[:, t] * x[:, other], h)
            outs.append(h)
        return torch.stack(outs, 1)


class ReadsItByAnotherName(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        outs = [torch.zeros(x.shape[0], 8)]
        kept = {"outs": outs}
        for t in range(x.shape[1]):
            outs.append(self.cell(x[:, t]))
        return torch.stack(kept["outs"][-1:], 1).expand(-1, x.shape[1], -1)


class ReadsTheirs(Recurrent):
    """A method reads the list of an attribute that the loop appends to."""

    def last(self) -> Tensor:
        return self.rows[-1]

    def run(self, x: Tensor) -> Tensor:
        self.rows, outs = [torch.zeros(x.shape[0], 8)], []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], self.last())
            self.rows.append(h)
            outs.append(h)
        return torch.stack(outs, 1)


class HeldTwice(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        seen = {"rows": [torch.zeros(x.shape[0], 8)]}
        also = seen["rows"]
        for t in range(x.shape[1]):
            seen["rows"].append(self.cell(x[:, t]))
        return torch.stack(also[-1:] * 1, 1).expand(-1, x.shape[1], -1) * len(also)


class Rows:
    """No list, but it grows."""

    def __init__(self) -> None:
        self.sum: Any = 0

    def append(self, row: Tensor) -> None:
        self.sum = self.sum + row


class AppendsToAnObject(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        kept = types.SimpleNamespace(rows=Rows())
        for t in range(x.shape[1]):
            kept.rows.append(self.cell(x[:, t]))
        return kept.rows.sum.unsqueeze(1).expand(-1, x.shape[1], -1)


class WritesSeveralToASlice(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], x.shape[1], 8)
        for t in range(x.shape[1]):
            out[:, t, 2:4] = x[:, t, :2]
        return out


class WritesEverySecond(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], x.shape[1], 8)
        for t in range(x.shape[1]):
            out[:, t, ::2] = x[:, t].mean()
        return out


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (WritesSeveralToASlice, "a loop writes several values to a slice"),
        (WritesEverySecond, "a loop writes to positions other than"),
        (CountsOutside, "CountsOutside.number changes from step to step and is no tensor"),
        (AppendsOutside, "it changes AppendsOutside.rows"),
        (SetsOutsideSometimes, "cannot be run as one step"),
        (SetsGlobals, "it stores into nn, which is no local name"),
        (ReadsItsFirst, "it reads outs, which it appends to"),
        (ReadsItByAnotherName, "it appends to outs, which kept is too or holds"),
        (ReadsTheirs, "a list whose length is a dim is asked for `__getitem__` while a loop"),
        (AppendsToAnObject, "it stores into a Rows"),
        (HeldTwice, "it appends to a list, which also is too or holds"),
        (AppendsNumbers, "the list that it makes grows by 1 of type tuple"),
        (ReadsThePast, "it computes with the number of its step"),
        (Counts, "k changes from step to step"),
        (Nested, "it holds another loop over a dynamic length"),
    ],
)
def test_a_loop_that_is_no_step_is_refused_with_the_reason(kind: type[Recurrent], why: str) -> None:
    with pytest.raises(ShapeRangeError, match="length becomes the number 12") as caught:
        _compiled(kind())
    assert why in str(caught.value)
    assert "test_refused_loops.py:" in str(caught.value)


def test_a_loop_whose_source_is_nowhere_is_refused_with_the_reason() -> None:
    text = """
def run(self, x):
    h = torch.zeros(x.shape[0], 8)
    for t in range(x.shape[1]):
        h = self.cell(x[:, t], h)
    return h.unsqueeze(1).expand(-1, x.shape[1], -1)
"""
    space: dict[str, Any] = {"torch": torch}
    exec(text, space)
    kind = type("OfNoFile", (Recurrent,), {"run": space["run"]})
    with pytest.raises(ShapeRangeError, match=r"source of run cannot be read .* file"):
        _compiled(kind())
