"""Python state that a loss reads and a user changes between steps: followed or refused."""

import array
import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import os
import sys
import threading
import types
import weakref
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from relax_disc.errors import InputMismatchError
from relax_disc.training.call.value_guards import ValueGuards
from tests.training.state.outer_batch import Holder, X, agree, captured, compiled, distance

VARIABLE = "RELAX_DISC_TEST_OF_STATE"


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


@torch.fx.wrap
def wrapped_for_tracers(dtype):
    return 2.0 if dtype == torch.float32 else 1.0


later = types.ModuleType("later")
later.first = later.second = 1.0


def by_module():
    return later.second


def of_list():
    weights = [1.0, 2.0]
    return lambda m, x: sum(w * distance(m, x) for w in weights), lambda: weights.append(5.0)


def of_functions():
    parts = [distance]
    return lambda m, x: sum(f(m, x) for f in parts), lambda: parts.append(distance)


def of_tensors():
    bank = [torch.ones(4)]
    return lambda m, x: sum((m(x) * t).mean() for t in bank), lambda: bank.append(torch.ones(4))


def of_empty_weight_of_a_criterion():
    criterion = nn.CrossEntropyLoss()

    def change():
        criterion.weight = torch.tensor([1.0, 2.0, 3.0, 4.0])

    return lambda m, x: criterion(m(x), x.argmax(-1)), change


def of_empty_bias_of_a_teacher():
    teacher = nn.Sequential(nn.Linear(4, 4, bias=False))

    def change():
        teacher[0].register_parameter("bias", nn.Parameter(torch.ones(4)))

    return lambda m, x: (m(x) - teacher(x)).pow(2).mean(), change


def of_empty_bias_beside_parameters():
    teacher = nn.Linear(4, 4, bias=False)

    def change():
        teacher.bias = nn.Parameter(torch.ones(4))

    return lambda m, x: distance(m, x) + sum(p.sum() for p in teacher.parameters()), change


def of_keyword_of_a_partial_function():
    def loss_fn(model, x, doubled=False, mean=1.0):
        return model(x).mean() * (2 if doubled else 1)

    part = functools.partial(loss_fn, doubled=False, mean=1.0)
    return part, lambda: part.keywords.update(doubled=True)


def of_dict_that_lies_elsewhere_too():
    judge, options = Judge(), {"mean": None}
    judge.options, judge.first = options, [options]
    held = (judge.first,)

    def loss_fn(model, x):
        return judge.score(model(x)) * (1 if held[0][0]["mean"] is None else 2)

    return loss_fn, lambda: options.update(mean=2.0)


def of_dict_by_all_attributes():
    judge = Judge()
    judge.options = {"mean": None}

    def loss_fn(model, x):
        return judge.score(model(x)) * (1 if vars(judge)["options"]["mean"] is None else 2)

    return loss_fn, lambda: judge.options.update(mean=2.0)


def of_dict_read_past_what_is_noted():
    judge = Judge()
    judge.options = {"mean": None}

    def loss_fn(model, x):
        options = object.__getattribute__(judge, "options")
        return judge.score(model(x)) * (1 if options["mean"] is None else 2)

    return loss_fn, lambda: judge.options.update(mean=2.0)


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


def of_context():
    level = contextvars.ContextVar("level", default=1.0)
    return lambda m, x: distance(m, x) * level.get(), lambda: level.set(3.0)


def of_context_without_a_value():
    level = contextvars.ContextVar("level")
    return lambda m, x: distance(m, x) * level.get(1.0), lambda: level.set(3.0)


def of_environment():
    return (
        lambda m, x: distance(m, x) * float(os.environ[VARIABLE]),
        lambda: os.environ.update({VARIABLE: "3"}),
    )


def of_environment_by_default():
    return (
        lambda m, x: distance(m, x) * float(os.getenv(f"{VARIABLE}_2", "1")),
        lambda: os.environ.update({f"{VARIABLE}_2": "3"}),
    )


def of_environment_that_is_looked_through():
    return (
        lambda m, x: distance(m, x) * sum(name == f"{VARIABLE}_3" for name in os.environ),
        lambda: os.environ.update({f"{VARIABLE}_3": "3"}),
    )


def of_dict_of_the_users():
    options = collections.UserDict(weight=1.0)
    return lambda m, x: distance(m, x) * options["weight"], lambda: options.update(weight=3.0)


def of_chained_dicts():
    options = collections.ChainMap({}, {"weight": 1.0})
    return lambda m, x: distance(m, x) * options["weight"], lambda: options.update(weight=3.0)


def of_array():
    weights = array.array("d", [1.0])
    return lambda m, x: distance(m, x) * weights[0], lambda: weights.__setitem__(0, 3.0)


def of_bytes():
    weights = bytearray(b"1")
    return lambda m, x: distance(m, x) * weights[0], lambda: weights.__setitem__(0, 3)


def of_array_as_default():
    weights = np.ones(1)

    def part(h, weights=weights):
        return h * float(weights[0])

    def change():
        return weights.__setitem__(0, 3.0)

    return lambda m, x: part(distance(m, x)), change


def of_thread():
    local = threading.local()
    local.power = 2
    return lambda m, x: m(x).pow(local.power).mean(), lambda: setattr(local, "power", 4)


def of_parameters():
    teacher = nn.Linear(4, 4)

    def change():
        teacher.register_parameter("extra", nn.Parameter(torch.ones(1)))

    return lambda m, x: distance(m, x) + sum(p.sum() for p in teacher.parameters()), change


def of_modules_with_parameters():
    teacher = nn.Linear(4, 4)

    def change():
        teacher.add_module("extra", nn.Linear(2, 2))

    return lambda m, x: distance(m, x) + sum(p.sum() for p in teacher.parameters()), change


def of_buffers():
    teacher = nn.BatchNorm1d(4)

    def change():
        teacher.register_buffer("extra", torch.ones(1))

    return lambda m, x: distance(m, x) * len(list(teacher.buffers())), change


POWER = 2


class Powers:
    @staticmethod
    def static(h):
        return h.pow(POWER)

    @classmethod
    def of_class(cls, h):
        return h.pow(POWER)

    @property
    def power(self):
        return POWER

    def method(self, h):
        return h.pow(POWER)


def raise_power():
    global POWER
    POWER = 4 if POWER == 2 else 2


def of_static_method():
    return lambda m, x: Powers.static(m(x)).mean(), raise_power


def of_class_method():
    return lambda m, x: Powers.of_class(m(x)).mean(), raise_power


def of_property():
    powers = Powers()
    return lambda m, x: m(x).pow(powers.power).mean(), raise_power


def of_object_made_in_the_loss():
    return lambda m, x: Powers().method(m(x)).mean(), raise_power


def of_global_by_its_name():
    return lambda m, x: m(x).pow(globals()["POWER"]).mean(), raise_power


def of_evaluated_text():
    return lambda m, x: m(x).pow(eval("POWER + 1")).mean(), raise_power


def of_function_in_module():
    module = types.ModuleType("losses")
    vars(module)["loss"] = lambda h: h.mean()

    def change():
        vars(module)["loss"] = lambda h: h.sum()

    return lambda m, x: module.loss(m(x)), change


def of_command_line():
    sys.argv.append("2")
    return lambda m, x: m(x).pow(int(sys.argv[-1])).mean(), lambda: sys.argv.__setitem__(-1, "4")


def of_member_as_key():
    powers = {Mode.PLAIN: 2}
    return lambda m, x: m(x).pow(powers[Mode.PLAIN]).mean(), lambda: powers.update({Mode.PLAIN: 4})


def of_tuple_as_key():
    powers = {("a", 1): 2, "b": 2}

    def change():
        powers["a", 1] = 4

    return lambda m, x: m(x).pow(powers["a", 1] + powers["b"]).mean(), change


def of_list_of_the_users():
    weights = type("Weights", (list,), {})([1.0])
    return lambda m, x: distance(m, x) * sum(weights), lambda: weights.append(2.0)


def of_set_of_the_users():
    weights = type("Weights", (set,), {})([1.0])
    return lambda m, x: distance(m, x) * sum(weights), lambda: weights.add(2.0)


def of_view_of_a_dict():
    powers = {"a": 2}
    view = types.MappingProxyType(powers)
    return lambda m, x: m(x).pow(view["a"]).mean(), lambda: powers.update(a=4)


def of_weak_reference():
    judge = Judge()
    judge.power = 2
    weak = weakref.ref(judge)
    return lambda m, x: m(x).pow(weak().power).mean(), lambda: setattr(judge, "power", 4)


def of_attribute_of_a_tensor():
    tensor: Any = torch.ones(4)
    tensor.power = 2
    return lambda m, x: (m(x) * tensor).pow(tensor.power).mean(), lambda: setattr(
        tensor, "power", 4
    )


def of_attribute_of_a_teachers_parameter():
    teacher: Any = nn.Linear(4, 4)
    teacher.weight.power = 2

    def change():
        teacher.weight.power = 4

    return lambda m, x: (m(x) - teacher(x)).pow(teacher.weight.power).mean(), change


def of_all_attributes():
    options = types.SimpleNamespace(reduction="mean")
    holder = Holder(None)
    holder.reduction = "mean"

    def change():
        holder.reduction = "sum"

    return (
        lambda m, x: (
            F.mse_loss(m(x), x, **vars(options))
            + F.mse_loss(m(x), x, reduction=vars(holder)["reduction"])
        ),
        change,
    )


def of_copied_object():
    holder = Judge()
    return lambda m, x: m(x).pow(copy.copy(holder).mode.value + 1).mean(), lambda: setattr(
        holder, "mode", Mode.DOUBLED
    )


def of_module_without_attributes():
    teacher = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    return lambda m, x: F.mse_loss(m(x), teacher(x)), lambda: teacher.__setitem__(1, nn.Tanh())


REFUSED = [value for name, value in list(globals().items()) if name.startswith("of_")]


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(os.environ, "_data", {**os.environ._data})
    os.environ[VARIABLE] = "1"


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_changes_that_cannot_be_followed_are_refused(kind):
    loss_fn, change = kind()
    guards = ValueGuards(captured(nn.Linear(4, 4), loss_fn).outer.guards)
    guards.check()
    change()
    with pytest.raises(InputMismatchError, match="compile"):
        guards.check()


def test_functions_wrapped_for_other_tracers_stay_the_same():
    def loss_fn(model, x):
        return distance(model, x) * wrapped_for_tracers(x.dtype)

    step = compiled(nn.Linear(4, 4), X, loss_fn=loss_fn)
    step(X)
    step(X[:3])
    with (
        patch.dict(globals(), wrapped_for_tracers=lambda dtype: 1.0),
        pytest.raises(InputMismatchError, match="wrapped_for_tracers was replaced"),
    ):
        step(X)


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


def test_items_of_an_attribute_that_nothing_reads_may_change():
    judge = Judge()
    judge.best, judge.seen = {"mean": None, "pow": "none"}, [{"mean": None}]
    judge.best["itself"] = judge.best

    def loss_fn(model, x):
        return judge.score(model(x))

    guards = ValueGuards(captured(nn.Linear(4, 4), loss_fn).outer.guards)
    judge.best.update(mean=0.5, pow="first")
    judge.seen[0]["mean"] = 0.5
    guards.check()


def test_what_a_layer_does_not_have_is_refused_when_it_comes():
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.BatchNorm1d(4, affine=False),
    )
    count = len(captured(model, distance).outer.guards)
    guards = ValueGuards(captured(model, distance).outer.guards)
    assert len(captured(nn.Sequential(nn.Linear(4, 4), *model[1:]), distance).outer.guards) < count
    for layer, name in ((0, "bias"), (1, "weight"), (1, "bias"), (2, "weight"), (2, "bias")):
        guards.check()
        setattr(model[layer], name, nn.Parameter(torch.ones(4)))
        with pytest.raises(InputMismatchError, match=rf"model\.{layer}\.{name} was None"):
            guards.check()
        setattr(model[layer], name, None)
    guards.check()


def test_a_loss_over_all_parameters_takes_one_comparison_for_each_table():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(20)]
    model = nn.Sequential(*layers)

    def loss_fn(model, x):
        return distance(model, x) + sum(p.pow(2).sum() for p in model.parameters())

    guards = captured(model, loss_fn).outer.guards
    of_tables = [g for g in guards if g.part == "keys"]
    assert len(of_tables) == 2 * len(list(model.modules()))
    assert len(guards) - len(of_tables) < 80
