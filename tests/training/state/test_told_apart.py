"""Optimizers of the user's own that tell parameters apart, or read more than groups and state."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import InputMismatchError, UnsupportedOperatorError

RATES = {"rate": 0.1}


class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "table": {"lr": 0.1}, "scales": [1.0, 2.0, 3.0, 4.0]})
        self.first = next(iter(self.param_groups[0]["params"]))
        self.special, self.ids = {self.first}, {id(self.first)}
        self.rates, self._rate, self.counts = {"rate": 0.1}, 0.1, {"steps": 0}
        self.rate_of = lambda: self._rate

    @torch.no_grad()
    def step(self, closure=None):
        for index, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.factor(index, place, group, p))

    def factor(self, index, place, group, p):
        return 1.0


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def made(factor):
    return type("Made", (Own,), {"factor": factor})


def compiled(model, optimizer):
    rows = Dim("rows", min=1, max=16)
    return relax_disc.compile(
        model,
        optimizer,
        (torch.randn(3, 4),),
        dynamic_shapes=({0: rows},),
        loss_fn=lambda model, x: model(x).pow(2).mean(),
    )


def assert_as_eager(kind, steps=4, change=lambda optimizer, step: None):
    model = network()
    twin = copy.deepcopy(model)
    optimizer, eager = kind(model.parameters()), kind(twin.parameters())
    step = compiled(model, optimizer)
    for number in range(steps):
        change(optimizer, number)
        change(eager, number)
        x = torch.randn(number + 1, 4)
        step(x)
        eager.zero_grad()
        twin(x).pow(2).mean().backward()
        eager.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    return optimizer


@pytest.mark.parametrize(
    "factor",
    [
        lambda self, index, place, group, p: 1.0 / (1 + place),
        lambda self, index, place, group, p: group["scales"][place],
        lambda self, index, place, group, p: 1.0 if p is group["params"][-1] else 2.0,
        lambda self, index, place, group, p: 2.0 if p in self.special else 1.0,
        lambda self, index, place, group, p: 2.0 if id(p) in self.ids else 1.0,
        lambda self, index, place, group, p: getattr(p, "scale", 1.0),
    ],
    ids=["place", "list", "last", "set", "id", "attribute"],
)
def test_a_step_that_tells_parameters_apart_is_refused(factor):
    model = network()
    model[0].bias.scale = 0.5
    with pytest.raises(UnsupportedOperatorError, match="in different ways, by their places"):
        compiled(model, made(factor)(model.parameters()))


def test_parameters_that_are_told_apart_by_their_groups_are_refused():
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    kind = made(lambda self, index, place, group, p: 1.0 + index)
    with pytest.raises(UnsupportedOperatorError, match="in different ways"):
        compiled(model, kind(groups))


@pytest.mark.parametrize(
    "factor",
    [
        lambda self, index, place, group, p: 1.0 if p.dim() > 1 else 0.5,
        lambda self, index, place, group, p: min(1.0, p.numel() / 8),
        lambda self, index, place, group, p: 1.0 if isinstance(p, nn.Parameter) else 0.5,
        lambda self, index, place, group, p: 1.0 if p.requires_grad and p.is_leaf else 0.5,
        lambda self, index, place, group, p: self.rates["rate"] * RATES["rate"] * self.rate_of(),
    ],
    ids=["rank", "size", "class", "trained", "read"],
)
def test_a_step_that_treats_a_kind_alike_is_eagers(factor):
    assert_as_eager(made(factor))


@pytest.mark.parametrize(
    ("factor", "change", "what"),
    [
        (lambda self, *_: self.rates["rate"], lambda o: o.rates.update(rate=0.2), "rates['rate']"),
        (lambda self, *_: self._rate, lambda o: vars(o).update(_rate=0.2), "_rate"),
        (lambda self, *_: self.rate_of(), lambda o: vars(o).update(_rate=0.2), "_rate"),
        (
            lambda self, index, place, group, p: group["table"]["lr"],
            lambda o: o.param_groups[0]["table"].update(lr=0.2),
            "['table']['lr']",
        ),
        (
            lambda self, *_: RATES["rate"],
            lambda o: RATES.update(rate=0.2),
            "RATES['rate']",
        ),
    ],
    ids=["dict", "private", "function", "group", "global"],
)
def test_what_a_step_reads_elsewhere_may_not_change(factor, change, what, monkeypatch):
    monkeypatch.setitem(RATES, "rate", 0.1)
    model = network()
    optimizer = made(factor)(model.parameters())
    step, x = compiled(model, optimizer), torch.randn(2, 4)
    step(x)
    before = copy.deepcopy(model.state_dict())
    change(optimizer)
    with pytest.raises(InputMismatchError) as caught:
        step(x)
    assert f"{what} was 0.1 when the step was compiled" in str(caught.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_count_elsewhere_is_refused_and_put_back():
    def factor(self, index, place, group, p):
        self.counts["steps"] += 1
        return 1.0 / self.counts["steps"]

    model = network()
    optimizer = made(factor)(model.parameters())
    with pytest.raises(UnsupportedOperatorError, match=r"changes counts\['steps'\]"):
        compiled(model, optimizer)
    assert optimizer.counts == {"steps": 0}


class Difference(torch.optim.Optimizer):
    """As timm's Adan: the group has no count before the first step, which begins anew."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            for p in group["params"]:
                state = self.state[p]
                if "before" not in state or group["step"] == 1:
                    state["before"] = p.grad.clone()
                change = p.grad + (p.grad - state["before"]) / (1 - 0.5 ** group["step"])
                p.add_(change, alpha=-group["lr"])
                state["before"].copy_(p.grad)


def test_a_count_that_the_first_step_makes_in_its_group():
    optimizer = assert_as_eager(Difference, steps=5)
    assert optimizer.param_groups[0]["step"] == 5


class Begins(Difference):
    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("seed", 7)
        super().step()


def test_a_number_that_the_first_step_makes_in_its_group_is_refused():
    model = network()
    with pytest.raises(UnsupportedOperatorError, match="makes seed in its group"):
        compiled(model, Begins(model.parameters()))
