"""What a model's code leaves in Python: refused where its next call would compute otherwise."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import UnsupportedOperatorError

BATCH = Dim("batch", min=1, max=16)
ROWS = (4, 3, 1, 7)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_first, self.kept, self.table, self.list = True, None, {}, []
        self.register_buffer("steps", torch.arange(4.0))

    def forward(self, x):
        return self.used(self.linear(x), x).pow(2).mean()


class Flag(Linear):
    def used(self, h, x):
        if self.is_first:
            self.is_first = False
            return 2 * h
        return h


class Initialized(Linear):
    """Glow's ActNorm."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def used(self, h, x):
        if not self.table.get("is_initialized"):
            self.scale.data.copy_(1 / (x.std(0, correction=0) + 1))
            self.table["is_initialized"] = True
        return h * self.scale


class Kept(Linear):
    def used(self, h, x):
        if self.kept is None:
            self.kept = x.mean(0)
        return h - self.kept


class KeptByName(Linear):
    def used(self, h, x):
        if "mean" not in self.table:
            self.table["mean"] = h.mean(0).detach()
        return h - self.table["mean"]


class Before(Linear):
    def used(self, h, x):
        loss = h if self.kept is None else h - self.kept
        self.kept = h.mean(0).detach()
        return loss


class Window(Linear):
    def used(self, h, x):
        self.list.append(x.mean(0))
        if len(self.list) > 2:
            self.list.pop(0)
        return h - sum(self.list) / len(self.list)


class New(Linear):
    def used(self, h, x):
        if hasattr(self, "seen"):
            return h
        self.seen = 1
        return 3 * h


class Default(Linear):
    def used(self, h, x, calls=[]):  # noqa: B006
        calls.append(1)
        return h * len(calls)


def compiled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(ROWS[0], 4)
    return relax_disc.compile(model, optimizer, (batch,), dynamic_shapes=({0: BATCH},))


def as_eager(model):
    """Compare a step's losses with those of a twin that is trained in eager PyTorch."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    step = compiled(model)
    for rows in ROWS:
        x = torch.randn(rows, 4)
        optimizer.zero_grad()
        expected = twin(x)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("made", "left"),
    [
        (Flag, "model.is_first"),
        (Initialized, "model.table['is_initialized']"),
        (Kept, "model.kept"),
        (KeptByName, "model.table['mean']"),
        (Before, "model.kept"),
        (Window, "model.list"),
        (New, "model.seen"),
        (Default, "calls"),
    ],
)
def test_a_next_call_that_is_another_program_is_refused(made, left):
    model = made()
    attributes, values = dict(vars(model)), copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedOperatorError, match="next call another program") as caught:
        compiled(model)
    assert f"leaves in {left} makes" in str(caught.value)
    assert vars(model) == attributes
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)


@pytest.mark.parametrize("made", [Flag, Initialized, Kept, KeptByName, New])
def test_after_a_first_call_the_later_ones_are_compiled(made):
    model = made()
    with torch.no_grad():
        model(torch.randn(5, 4))
    as_eager(model)


class Told(Linear):
    def used(self, h, x):
        if self.is_first:
            self.is_first = False
            self.table["told"] = "once"
        return h


class Logged(Linear):
    def used(self, h, x):
        self.list.append(h.detach())
        self.table["mean"] = h.mean()
        return h


class Hooked(Linear):
    def __init__(self):
        super().__init__()
        self.linear.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.table["out"] = output

    def used(self, h, x):
        return self.table["out"]


class OfSizes(Linear):
    """A mask that is kept until the length changes depends on the length alone."""

    def used(self, h, x):
        if self.kept is None or self.kept.shape[0] != x.shape[0]:
            self.kept = torch.ones_like(x) / x.shape[0]
        return h * self.kept


class OfBuffers(Linear):
    def used(self, h, x):
        if self.kept is None:
            self.kept = torch.outer(torch.arange(4.0), self.steps)
        return h @ self.kept


@pytest.mark.parametrize("made", [Told, Logged, Hooked, OfSizes, OfBuffers])
def test_what_makes_no_difference_is_told_and_put_back(made):
    model = made()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = compiled(model)
    assert any("is changed by the model" in str(each.message) for each in caught)
    assert model.is_first and model.kept is None and not model.table and not model.list
    x = torch.randn(6, 4)
    expected = copy.deepcopy(model)(x).detach()
    if made is Hooked:  # the hook of the copy is the model's own
        model.table.clear()
    torch.testing.assert_close(step(x), expected, rtol=1e-5, atol=1e-6)
