"""Python state that a loss reads and a user changes between steps: followed or refused."""

import collections
import dataclasses
import enum
import functools
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.capture.export import export, wrap_step
from relax_disc.training.call.value_guards import ValueGuards
from tests.training.state.outer_batch import X, agree, compiled


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


class Dotted(dict):
    """A dict whose items are attributes, as EasyDict and Munch are."""

    __getattr__ = dict.__getitem__


@dataclasses.dataclass(slots=True)
class Settings:
    weight: float = 1.0


class Judge:
    def __init__(self):
        self.mode, self.prior = Mode.PLAIN, torch.distributions.Normal(0.0, 1.0)

    def score(self, h):
        return h.pow(2).mean()


later = types.ModuleType("later")
later.first = later.second = 1.0


def by_module():
    return later.second


def distance(model, x):
    return model(x).pow(2).mean()


def of_list():
    weights = [1.0, 2.0]
    return lambda m, x: sum(w * distance(m, x) for w in weights), lambda: weights.append(5.0)


def of_functions():
    parts = [distance]
    return lambda m, x: sum(f(m, x) for f in parts), lambda: parts.append(distance)


def of_tensors():
    bank = [torch.ones(4)]
    return lambda m, x: sum((m(x) * t).mean() for t in bank), lambda: bank.append(torch.ones(4))


def of_function_in_dict():
    parts: dict[str, Any] = {"loss": distance}
    return lambda m, x: parts["loss"](m, x), lambda: parts.update(loss=lambda m, x: m(x).mean())


def of_missing_key():
    options = {}

    def change():
        return options.update(alpha=3.0)

    return lambda m, x: distance(m, x) * options.get("alpha", 1.0), change


def of_new_value():
    weights = {"a": 1.0}

    def change():
        return weights.update(b=3.0)

    return lambda m, x: sum(v * distance(m, x) for v in weights.values()), change


def of_computed_key():
    options = {"name": "x", "use_a": True, "use_b": False}

    def loss_fn(model, x):
        used = [k for k in "ab" if options[f"use_{k}"]]
        return distance(model, x) * len(used) * (options["name"] == "x")

    return loss_fn, lambda: options.update(use_b=True)


def of_set():
    used = {"a"}
    return lambda m, x: distance(m, x) * (2 if "b" in used else 1), lambda: used.add("b")


def of_missing_attribute():
    holder = Judge()

    def change():
        return setattr(holder, "extra", 3.0)

    return lambda m, x: distance(m, x) * getattr(holder, "extra", 1.0), change


def of_enum():
    judge = Judge()

    def change():
        return setattr(judge, "mode", Mode.DOUBLED)

    return lambda m, x: distance(m, x) * (2 if judge.mode is Mode.DOUBLED else 1), change


def of_distribution():
    judge = Judge()

    def change():
        return setattr(judge, "prior", torch.distributions.Normal(0.0, 2.0))

    return lambda m, x: -judge.prior.log_prob(m(x)).mean(), change


def of_method():
    judge = Judge()
    return lambda m, x: judge.score(m(x)), lambda: setattr(judge, "score", torch.Tensor.mean)


def of_slots():
    settings = Settings()
    return lambda m, x: distance(m, x) * settings.weight, lambda: setattr(settings, "weight", 3.0)


def of_cached_function():
    settings = {"weight": 1.0}

    @functools.lru_cache
    def weight():
        return settings["weight"]

    def change():
        settings["weight"] = 3.0
        weight.cache_clear()

    return lambda m, x: distance(m, x) * weight(), change


def of_required_gradients():
    teacher = nn.Linear(4, 4)

    def count():
        return sum(p.requires_grad for p in teacher.parameters())

    return lambda m, x: distance(m, x) * count(), lambda: teacher.requires_grad_(False)


REFUSED = [value for name, value in list(globals().items()) if name.startswith("of_")]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_changes_that_cannot_be_followed_are_refused(kind):
    loss_fn, change = kind()
    exported = export(wrap_step(nn.Linear(4, 4), loss_fn), (X,), ({0: Dim("batch", max=64)},))
    guards = ValueGuards(exported.outer.guards)
    guards.check()
    change()
    with pytest.raises(InputMismatchError, match="compile"):
        guards.check()


def of_deque():
    weights = collections.deque([1.0, 2.0], maxlen=2)
    return lambda m, x: sum(w * distance(m, x) for w in weights), lambda: weights.append(5.0)


def of_counter():
    counts = collections.Counter(seen=1)

    def change():
        return counts.update(seen=2)

    return lambda m, x: distance(m, x) * counts["seen"], change


def of_dotted_dict():
    options = Dotted(inner=Dotted(weight=1.0))

    def change():
        return options.inner.update(weight=3.0)

    return lambda m, x: distance(m, x) * options.inner.weight, change


def of_function_attribute():
    def loss_fn(model, x):
        return distance(model, x) * loss_fn.weight

    loss_fn.weight = 1.0
    return loss_fn, lambda: setattr(loss_fn, "weight", 3.0)


def of_module_in_a_later_function():
    later.second = 1.0

    def change():
        return setattr(later, "second", 3.0)

    return lambda m, x: later.first * distance(m, x) * by_module(), change


def of_distribution_parameters():
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))

    def change():
        return setattr(prior, "scale", torch.full((4,), 2.0))

    return lambda m, x: -prior.log_prob(m(x)).mean(), change


def of_learning_rate():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)

    def change():
        return optimizer.param_groups[0].update(lr=3.0)

    return lambda m, x: distance(m, x) * optimizer.param_groups[0]["lr"], change


FOLLOWED = [
    value
    for name, value in list(globals().items())
    if name.startswith("of_") and value not in REFUSED
]


def test_changes_of_numbers_and_tensors_are_followed():
    kinds = [kind() for kind in FOLLOWED]

    def loss_fn(model, x):
        return sum(part(model, x) for part, _ in kinds)

    model = nn.Linear(4, 4)
    step = compiled(model, X, loss_fn=loss_fn)
    for _, change in kinds:
        before = float(step(X))
        change()
        agree(step, loss_fn, model)
        assert abs(float(step(X)) - before) > 1e-3


def test_modules_that_are_added_are_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    step = compiled(model, X, loss_fn=distance)
    model.append(nn.Tanh())
    with pytest.raises(InputMismatchError, match=r"model has '1' now"):
        step(X)
    del model[1]
    step(X)


def test_what_nothing_reads_may_change():
    class Holder(Judge):
        pass

    judge, seen, options = Holder(), [], {"weight": 1.0}
    judge.history = []

    def loss_fn(model, x):
        return judge.score(model(x)) * options["weight"]

    model = nn.Linear(4, 4)
    step = compiled(model, X, loss_fn=loss_fn)
    judge.history.append(1.0)
    judge.best = "first"
    seen.append(2.0)
    options["best_so_far"] = 3.0
    agree(step, loss_fn, model)
