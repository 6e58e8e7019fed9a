"""A buffer that modules share is one tensor, in the forward and in a gradient of the user's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import InputMismatchError


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(base.clone())  # which is moved before the backward
        return base * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (base,) = ctx.saved_tensors
        return None, (grad * base).sum(0)


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base: Tensor
        self.register_buffer("base", torch.randn(4, 4), persistent=False)


class Adapter(nn.Module):
    """Scales a base that others share, as RandLoRA does; each call also moves the base."""

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.bank, self.gain = bank, nn.Parameter(torch.ones(4))
        self.again: Tensor
        self.register_buffer("again", bank.base)  # the same tensor under another name

    def forward(self, x: Tensor) -> Tensor:
        y = x @ Scaled.apply(self.bank.base, self.gain)
        self.again.mul_(0.5)
        return y + self.bank.base[0]


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bank = Bank()
        self.first, self.second = Adapter(self.bank), Adapter(self.bank)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def test_a_buffer_that_modules_share_trains_as_in_eager() -> None:
    torch.manual_seed(0)
    model = Adapted()
    eager = copy.deepcopy(model)
    assert eager.bank.base is eager.first.again
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dims = ({0: Dim("n", min=1, max=9)},)
    step = relax_disc.compile(model, optimizer, (torch.ones(3, 4),), dynamic_shapes=dims)
    for rows in (3, 1, 9):
        x = torch.randn(rows, 4)
        loss = eager(x)
        expected = torch.autograd.grad(loss, list(eager.parameters()))
        torch.testing.assert_close(step(x, update=False), loss.detach())
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        torch.testing.assert_close(model.bank.base, eager.bank.base, rtol=0, atol=0)
        optimizer.zero_grad()
    assert model.second.bank.base is model.first.again  # nothing of the trace is left there
    model.first.again = torch.ones(4, 4)
    with pytest.raises(InputMismatchError, match=r"was the same tensor as"):
        step(torch.ones(3, 4))


class Part(nn.Module):
    """Writes a part of a buffer that it reads as a whole."""

    def __init__(self, is_written: bool) -> None:
        super().__init__()
        self.layer, self.is_written = nn.Linear(4, 4), is_written
        self.whole: Tensor
        self.part: Tensor
        self.register_buffer("whole", torch.ones(32))
        self.register_buffer("part", self.whole[16:])

    def forward(self, x: Tensor) -> Tensor:
        if self.is_written:
            self.part.mul_(0.5)
        return (self.layer(x) * self.whole.sum() * self.part.sum()).square().mean()


def test_a_part_of_another_buffer_is_not_written_apart_from_it() -> None:
    x, rows = torch.ones(3, 4), ({0: Dim("rows", min=1, max=8)},)
    with pytest.raises(InputMismatchError, match="buffer whole and buffer part share memory"):
        relax_disc.compile(Part(is_written=True), None, (x,), dynamic_shapes=rows)
    model = Part(is_written=False)
    step = relax_disc.compile(model, None, (x,), dynamic_shapes=rows)
    torch.testing.assert_close(step(x, update=False), model(x).detach())


class ReadsItsWeightTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.still = self.layer.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) @ self.still).square().mean()


def test_a_detached_weight_is_read_where_no_step_writes_it() -> None:
    x, rows = torch.ones(3, 4), ({0: Dim("rows", min=1, max=8)},)
    model = ReadsItsWeightTwice()
    step = relax_disc.compile(model, None, (x,), dynamic_shapes=rows)
    for _ in range(2):
        torch.testing.assert_close(step(x, update=False), model(x).detach())
        with torch.no_grad():
            model.layer.weight.mul_(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InputMismatchError, match=r"layer\.weight and .*still share memory"):
        relax_disc.compile(model, optimizer, (x,), dynamic_shapes=rows)
