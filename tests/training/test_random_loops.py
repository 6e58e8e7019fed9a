"""Random numbers in Python loops over a dynamic length: each step draws its own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import relax_disc
from relax_disc.errors import ShapeRangeError, UnsupportedOperatorError
from tests.tiers import every

_LONGEST = 24
_DIMS = {0: Dim("batch", min=1, max=16), 1: Dim("length", min=1, max=_LONGEST)}
_SHAPES = ((16, _LONGEST), (1, 1), (3, 9))


def _filled(v: Tensor) -> Tensor:
    return v * torch.empty(v.shape[0], 1).bernoulli_(0.25)


def _attention(v: Tensor) -> Tensor:
    row = v[:, None, :, None]
    flat = torch.zeros(v.shape[0], 1, 6, 1)
    drawn = functional.scaled_dot_product_attention(flat, flat, row, dropout_p=0.5)
    same = functional.scaled_dot_product_attention(flat, flat, row)
    return (drawn + same)[:, 0, :, 0]


def _without_gradient(v: Tensor) -> Tensor:
    with torch.no_grad():
        row = torch.rand_like(v) * v.detach().sign()
    return v * row


_LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda v: functional.dropout(v, 0.3),
    "dropout in place": lambda v: functional.dropout(v * 2, 0.5, inplace=True),
    "channels": lambda v: functional.dropout2d(v[:, :, None, None].expand(-1, -1, 2, 2)).sum(3)[
        :, :, 0
    ],
    "normal": lambda v: v * torch.randn(v.shape[0], 6) + v * torch.normal(0.5, 0.1, v.shape),
    "filled": _filled,
    "like": lambda v: v * torch.rand_like(v) + v * torch.empty_like(v).exponential_(),
    "probabilities": lambda v: v * torch.bernoulli(torch.sigmoid(v.detach())),
    "gumbel": lambda v: v * functional.gumbel_softmax(v.detach(), tau=0.5, hard=True),
    "permutation": lambda v: v[:, torch.randperm(6)],
    "attention": _attention,
    "no gradient": _without_gradient,
}
"""Random functions that are linear in their operand."""


class _Scaled(nn.Module):
    """The mean of a random linear function of a weight, applied in each step by itself."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6).abs() + 0.5)
        self.draw = draw

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outs = []
        for t in range(x.shape[1]):
            outs.append(self.draw(self.weight * x[:, t]))
        made = torch.stack(outs, 1)
        return made.sum(), made


@pytest.mark.parametrize("kind", every(3, list(_LINEAR)))
def test_each_step_draws_its_own_numbers_and_its_gradient_reads_them(kind: str) -> None:
    torch.manual_seed(0)
    model = _Scaled(_LINEAR[kind])
    step = relax_disc.compile(model, None, (torch.rand(4, 5, 6),), dynamic_shapes=(_DIMS,))
    for batch, length in _SHAPES:
        x = torch.ones(batch, length, 6)
        model.zero_grad()
        loss, (made,) = step(x, update=False)
        gradient: Any = model.weight.grad
        # Euler: what is linear is its gradient times its operand.
        torch.testing.assert_close((gradient * model.weight).sum(), loss.detach())
        if batch < 16:
            continue
        assert not any(torch.equal(made[:, t], made[:, t - 1]) for t in range(length))
        assert not torch.equal(made, step(x, update=False)[1][0])
        # Means over the batch, one for each step: what is drawn for a whole batch counts once.
        eager = torch.cat([model(x)[1].detach().mean(0) for _ in range(4)])
        rows = torch.cat([step(x, update=False)[1][0].mean(0) for _ in range(4)])
        error = (eager.var(0) / len(eager) + rows.var(0) / len(rows)).sqrt()
        assert ((eager.mean(0) - rows.mean(0)).abs() <= 5 * error).all()


class _Decoder(nn.Module):
    """A recurrence with dropout of its input and its state; tells what it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 8)
        self.dropout = nn.Dropout(0.4)
        self.out = nn.Linear(8, 3)

    def forward(
        self, x: Tensor, y: Tensor, drawn: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = c = x.new_zeros(x.shape[0], 8)
        outs, inputs, states = [], [], []
        for t, row in enumerate(x.unbind(1)):
            if drawn is None:
                kept, noise = self.dropout(torch.ones_like(row)), torch.randn(x.shape[0], 8)
            else:
                kept, noise = drawn[0][:, t], drawn[1][:, t]
            h, c = self.cell(row * kept, (h + 0.1 * noise, c))
            outs.append(self.out(h))
            inputs.append(kept)
            states.append(noise)
        made = torch.stack(inputs, 1), torch.stack(states, 1)
        return functional.mse_loss(torch.stack(outs, 1), y), made


def _batch(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, 6), torch.randn(batch, length, 3)


def test_with_the_numbers_that_a_step_drew_eager_pytorch_computes_the_same() -> None:
    torch.manual_seed(0)
    model = _Decoder()
    eager = copy.deepcopy(model)
    step = relax_disc.compile(model, None, _batch(4, 5), dynamic_shapes=(_DIMS, _DIMS))
    for shape in _SHAPES:
        x, y = _batch(*shape)
        model.zero_grad()
        loss, (drawn,) = step(x, y, update=False)
        assert set(drawn[0].unique().tolist()) <= {0.0, float(torch.tensor(1.0) / 0.6)}
        expected, _ = eager(x, y, drawn)
        gradients = torch.autograd.grad(expected, list(eager.parameters()))
        torch.testing.assert_close(loss, expected.detach())
        for ours, theirs in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(ours.grad, theirs, rtol=1e-4, atol=1e-6)


class _Wide(nn.Module):
    """A recurrence with dropout between wide layers, whose activations a budget leaves no room."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Sequential(nn.Linear(8, 64), nn.Tanh())
        self.cell = nn.RNNCell(64, 8)
        self.out = nn.Linear(64, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        wide = torch.tanh(self.first(x))
        h, outs = x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            h = self.cell(functional.dropout(wide[:, t], 0.3), h)
            outs.append(self.last(functional.dropout(h, 0.2)) * torch.rand(64))
        return functional.mse_loss(self.out(torch.stack(outs, 1).tanh()), y)


def test_numbers_drawn_again_under_a_budget_are_the_same() -> None:
    torch.manual_seed(0)
    model = _Wide()
    other = copy.deepcopy(model)
    steps = []
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        steps.append(
            relax_disc.compile(each, optimizer, _batch(4, 5), dynamic_shapes=(_DIMS, _DIMS))
        )
    free, tight = steps
    for shape in _SHAPES:
        sizes = dict(zip(("batch", "length"), shape, strict=True))
        plan, batch = free.plan(**sizes), _batch(*shape)
        tight.memory_budget = int(plan.least_bytes)
        assert tight.memory_budget < plan.peak_bytes or shape == (1, 1)
        losses = []
        for step in steps:
            torch.manual_seed(3)
            losses.append(step(*batch))
        assert torch.equal(*losses)
        report = tight.memory_report()
        assert report.peak_bytes == tight.plan(**sizes).peak_bytes <= tight.memory_budget
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def _unknown(v: Tensor) -> Tensor:
    return v * torch.poisson(torch.ones(6))


def _view(v: Tensor) -> Tensor:
    made = torch.empty(v.shape[0], 6)
    row = made[0]
    made.uniform_()
    return v * row


def _cast(v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        row = torch.rand(6)
    return v * row


def _counts(v: Tensor) -> Tensor:
    with torch.no_grad():
        _COUNT.add_(1)
    return v * torch.rand(6)


_COUNT = torch.zeros(1)


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (_counts, "writes into a tensor in a region of its own"),
        (_cast, r"draws random numbers in a region of its own.*test_random_loops.py"),
        (_unknown, r"aten.poisson.default inside it draws random numbers.*test_random_loops.py"),
        (_view, "fills with random numbers a tensor that may have other names"),
    ],
)
def test_what_cannot_be_drawn_before_is_refused_with_the_reason(draw: Any, why: str) -> None:
    with pytest.raises(ShapeRangeError, match=why):
        relax_disc.compile(_Scaled(draw), None, (torch.rand(4, 5, 6),), dynamic_shapes=(_DIMS,))


class _Forced(nn.Module):
    """A decoder that goes on from the target or from what it said, and tells which."""

    def __init__(self, draw: Callable[[], Any], ratio: float) -> None:
        super().__init__()
        self.tokens, self.cell, self.out = nn.Embedding(9, 6), nn.GRUCell(6, 6), nn.Linear(6, 9)
        self.draw, self.ratio = draw, ratio

    def forward(self, target: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = torch.zeros(target.shape[0], 6)
        token = target[:, 0]
        outs, ways = [], []
        for t in range(1, target.shape[1]):
            h = self.cell(self.tokens(token), h)
            outs.append(self.out(h))
            best = outs[-1].argmax(1)
            is_forced = self.draw() < self.ratio if forced is None else forced[t - 1].bool()
            token = target[:, t] if is_forced else best
            ways.append(torch.ones(()) if is_forced else torch.zeros(()))
        scores = torch.stack(outs, 1).flatten(0, 1)
        return functional.cross_entropy(scores, target[:, 1:].flatten()), torch.stack(ways)


class _ForcedByStatements(_Forced):
    """The same, chosen by an ``if`` with names of one side alone, and an input that is floats."""

    def forward(self, target: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = row = torch.zeros(target.shape[0], 6)
        outs, ways = [], []
        for t in range(1, target.shape[1]):
            h = self.cell(row + self.tokens(target[:, t - 1]), h)
            score = self.out(h)
            way = torch.zeros(())
            chance = self.ratio if forced is None else forced[t - 1] * 2
            if chance > (self.draw() if forced is None else 1):
                way = torch.ones(())
                row = functional.one_hot(target[:, t] % 6, 6).float()
            else:
                values, _ = score.topk(6, dim=1)
                row = values.squeeze(-1) * 0.5
            outs.append(score)
            ways.append(way)
        scores = torch.stack(outs, 1).flatten(0, 1)
        return functional.cross_entropy(scores, target[:, 1:].flatten()), torch.stack(ways)


_FRACTIONS: dict[str, Callable[[], Any]] = {
    "random": lambda: random.random(),
    "uniform": lambda: random.uniform(0, 1),
    "numpy": lambda: np.random.rand(),
    "torch": lambda: torch.rand(1),
}


@pytest.mark.parametrize("draw", _FRACTIONS)
@pytest.mark.parametrize("kind", every(1, [_Forced, _ForcedByStatements]))
def test_teacher_forcing_goes_both_ways_and_computes_what_eager_does_there(
    kind: Any, draw: str
) -> None:
    torch.manual_seed(0)
    model = kind(_FRACTIONS[draw], 0.25)
    eager = copy.deepcopy(model)
    dims = {0: _DIMS[0], 1: Dim("length", min=2, max=200)}
    step = relax_disc.compile(model, None, (torch.randint(9, (4, 5)),), dynamic_shapes=(dims,))
    state = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    for batch, length in ((1, 2), (3, 9), (16, 200)):
        target = torch.randint(9, (batch, length))
        drawn = []
        for ratio in (0.0, 0.25, 1.0):
            model.ratio = ratio
            model.zero_grad()
            loss, (ways,) = step(target, update=False)
            expected, _ = eager(target, ways)
            gradients = torch.autograd.grad(expected, list(eager.parameters()))
            torch.testing.assert_close(loss, expected.detach())
            for ours, theirs in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(ours.grad, theirs, rtol=1e-4, atol=1e-6)
            drawn.append(ways.sum().item())
        assert (drawn[0], drawn[2]) == (0, length - 1)
    assert 20 <= drawn[1] <= 80  # of 199 by a chance of 0.25: more than 4 deviations
    model.ratio = 0.5
    assert not torch.equal(step(target, update=False)[1][0], step(target, update=False)[1][0])
    assert state == (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist())


class _Chosen(nn.Module):
    """Goes on from what an embedding or the model itself gives."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(9, 6), nn.GRUCell(6, 6)

    def forward(self, target: Tensor) -> Tensor:
        h = row = torch.zeros(target.shape[0], 6)
        for t in range(target.shape[1]):
            h = self.cell(row, h)
            truth = self.tokens(target[:, t])
            row = truth if random.random() < 0.5 else h
        return h.square().mean()


def test_a_parameter_of_one_side_alone_is_refused_unless_it_is_frozen() -> None:
    torch.manual_seed(0)
    dims = ({0: _DIMS[0], 1: Dim("length", min=2, max=9)},)
    batch = (torch.randint(9, (3, 4)),)
    with pytest.raises(UnsupportedOperatorError, match=r"random_loops.py:\d+: .* tokens.weight"):
        relax_disc.compile(_Chosen(), None, batch, dynamic_shapes=dims)
    model = _Chosen()
    model.tokens.requires_grad_(False)
    step = relax_disc.compile(model, None, batch, dynamic_shapes=dims)
    losses = {float(step(*batch, update=False)) for _ in range(20)}
    assert 2 <= len(losses) <= 8  # the last of four choices comes too late


class _Normed(nn.Module):
    """A layer of one side, called by a name that tensors have for a method."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        model = self
        if random.random() < 0.5:
            x = model.norm(x)
        else:
            x = x * 2
        return x.square().mean()


def test_a_layer_of_one_side_that_writes_its_buffers_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"random_loops.py:\d+: a branch on whether"):
        relax_disc.compile(_Normed(), None, (torch.rand(3, 4),), dynamic_shapes=({0: _DIMS[0]},))


@pytest.mark.parametrize(
    "choose",
    [
        lambda m, x: m(x) if random.random() < 0.5 else x,
        lambda m, x: m(x) * (2.0 if random.random() < 0.5 else 1.0),
        lambda m, x: m(x)[: 1 if random.random() < 0.5 else 2],
        lambda m, x: m(x) * int(random.random() * 3),
        lambda m, x: m(x) * random.randint(0, 3),
        lambda m, x: m(x) * random.Random(torch.randint(9, ()).item()).randrange(3),
    ],
    ids=["layer", "number", "size", "int", "randint", "seed"],
)
def test_other_choices_by_chance_are_refused(choose: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"random_loops.py|`random`"):
        relax_disc.compile(
            nn.Linear(4, 4),
            None,
            (torch.rand(3, 4),),
            dynamic_shapes=({0: _DIMS[0]},),
            loss_fn=lambda m, x: choose(m, x).mean(),
        )
