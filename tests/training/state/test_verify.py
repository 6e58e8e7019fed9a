"""`relax_disc.verify`: agrees on right steps, names what differs and its line, changes nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import InputMismatchError
from tests.tiers import every


class Net(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 1)
        self.rate = rate

    def forward(self, x):
        hidden = nn.functional.dropout(self.norm(self.first(x)), self.rate)
        return (self.second(torch.tanh(hidden)) - 1).square().mean()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5),
}


def make(kind, rate=0.0, **options):
    torch.manual_seed(0)
    model = Net(rate)
    optimizer = OPTIMIZERS[kind](model.parameters())
    shapes = ({0: Dim("rows", min=2, max=64)},)
    args = (torch.randn(4, 6),)
    return relax_disc.compile(model, optimizer, args, dynamic_shapes=shapes, **options)


BATCHES = [
    (torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows)),) for rows in (3, 9)
]


def state(step):
    return copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict()["state"]))


def flat(step):
    return [t for part in state(step) for t in torch.utils._pytree.tree_leaves(part)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", every(2, [2, 0]))
def test_agrees_and_changes_nothing(kind, steps):
    step = make(kind, max_grad_norm=0.1 if kind == "adamw" else None)
    twin = make(kind, max_grad_norm=0.1 if kind == "adamw" else None)
    for _ in range(steps):
        step(*BATCHES[0])
        twin(*BATCHES[0])
    before = flat(step)
    report = relax_disc.verify(step, BATCHES)
    assert report.ok, str(report)
    assert report.batches == 2
    assert report.tensors >= 2 * 7
    assert "all agree" in str(report)
    assert all(torch.equal(a, b) for a, b in zip(before, flat(step), strict=True))
    assert torch.equal(step(*BATCHES[1]), twin(*BATCHES[1]))
    assert all(torch.equal(a, b) for a, b in zip(flat(twin), flat(step), strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_names_the_first_difference_and_its_line(kind):
    step = make(kind)
    original = step._call

    def wrong(tensors, values):
        flat = original(tensors, values)
        with torch.no_grad():
            step.model.second.weight += 1e-3
        return flat

    step._call = wrong
    report = relax_disc.verify(step, BATCHES[:1])
    assert not report.ok
    assert report.differences[0].tensor == "parameter second.weight"
    assert "test_verify.py" in report.differences[0].source
    assert "second.weight" in str(report)


class AtAKink(nn.Module):
    """Rounding decides on which side of zero the first activation is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 1, bias=False), nn.Linear(1, 1)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[1.0, -1.0]]))

    def forward(self, x):
        return (self.second(self.first(x).relu()) - 1).square().mean()


@pytest.mark.parametrize("change", [2.0**-22, 2.0**-8])
def test_an_activation_at_a_kink_may_fall_on_either_side(change):
    torch.manual_seed(0)
    model, x = AtAKink(), torch.tensor([[1.0, 1.0], [1.0, -2.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = relax_disc.compile(model, optimizer, (x,), dynamic_shapes=({0: Dim("rows", max=8)},))
    original = step._call

    def other_rounding(tensors, values):
        with torch.no_grad():
            weight = model.first.weight.clone()
            model.first.weight[0, 0] += change
            flat = original(tensors, values)
            model.first.weight -= torch.tensor([[change, 0.0]])
        assert not torch.equal(weight, model.first.weight)
        return flat

    step._call = other_rounding
    report = relax_disc.verify(step, [(x,)])
    assert report.ok == (change < 1e-5), str(report)


def test_compares_with_a_loss_function():
    def loss_fn(model, x):
        return model(x) * 2

    step = make("sgd", loss_fn=loss_fn)
    assert relax_disc.verify(step, BATCHES).ok
    step.loss_fn = None
    report = relax_disc.verify(step, BATCHES)
    assert report.differences[0].tensor == "loss"
    assert relax_disc.verify(step, BATCHES, loss_fn=loss_fn).ok


def test_refuses_random_numbers():
    with pytest.raises(InputMismatchError, match="dropout"):
        relax_disc.verify(make("sgd", rate=0.5), BATCHES)
