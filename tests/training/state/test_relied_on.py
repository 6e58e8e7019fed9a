"""Python state that a loss reads and a user changes between steps: followed or refused."""

import array
import collections
import contextvars
import copy
import dataclasses
import datetime
import enum
import functools
import importlib
import itertools
import os
import queue
import random
import secrets
import sys
import threading
import time
import types
import uuid
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from relax_disc.errors import InputMismatchError, RelaxDiscWarning, UnsupportedOperatorError
from relax_disc.frontend.capture.export import export, wrap_step
from relax_disc.training.call.value_guards import ValueGuards
from tests.training.state.outer_batch import X, agree, compiled

SHAPES = ({0: Dim("batch", max=64)},)
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
    exported = export(wrap_step(nn.Linear(4, 4), loss_fn), (X,), SHAPES)
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


class Holder:
    def __init__(self, held):
        self.held = held


class Reads(nn.Module):
    def __init__(self, held, read):
        super().__init__()
        self.linear, self.held, self.read = nn.Linear(4, 4), held, read

    def forward(self, x):
        return (self.linear(x) * self.read(self.held)).pow(2).mean()


def by_variable(held, read):
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(held)


def by_attribute(held, read):
    holder = Holder(held)
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(holder.held)


def by_class(held, read):
    holder = type("Counting", (Holder,), {"held": held})
    del (instance := holder(None)).held
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(instance.held)


def by_item(held, read):
    holder = {"held": held}
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(holder["held"])


def by_default(held, read):
    def part(held=held):
        return read(held)

    return nn.Linear(4, 4), lambda m, x: distance(m, x) * part()


def by_model(held, read):
    return Reads(held, read), None


def by_submodule(held, read):
    return nn.Sequential(nn.Linear(4, 4), Reads(held, read)), None


def by_tuple(held, read):
    holder = ({"held": (1, held, 2)}, held)
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(holder[0]["held"][1])


def by_named_tuple(held, read):
    holder = collections.namedtuple("Held", "first second")(0, held)
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(holder.second)


def by_partial(held, read):
    def part(holder, model, x):
        return distance(model, x) * read(holder)

    loss_holder = functools.partial(part, held)
    return nn.Linear(4, 4), lambda m, x: loss_holder(m, x)


WAYS = [value for name, value in list(globals().items()) if name.startswith("by_")]
WAYS.remove(by_module)


def numbers():
    yield from (1.0, 2.0, 3.0)


def filled():
    found = queue.SimpleQueue()
    for number in (1.0, 2.0):
        found.put(number)
    return found


TAKEN = {
    "iterator": (lambda: iter([1.0, 2.0]), next),
    "loop": (
        lambda: iter([1.0, 2.0]),
        lambda held: next(w for w, _ in zip(held, "a", strict=False)),
    ),
    "zip": (lambda: zip([1.0], [2.0], strict=True), lambda held: sum(next(held))),
    "cycle": (lambda: itertools.cycle([1.0, 2.0]), next),
    "count": (itertools.count, next),
    "method of a count": (lambda: itertools.count().__next__, lambda held: held()),
    "generator": (numbers, next),
    "generator by send": (numbers, lambda held: held.send(None)),
    "queue": (filled, lambda held: held.get()),
}

DRAWN = {
    "Generator": (lambda: np.random.default_rng(0), lambda held: float(held.random())),
    "RandomState": (lambda: np.random.RandomState(0), lambda held: float(held.rand())),
    "Random": (lambda: random.Random(0), lambda held: held.random()),
    "method of a Random": (lambda: random.Random(0).uniform, lambda held: held(1.0, 2.0)),
}


def captured(model, loss_fn):
    return export(wrap_step(model, loss_fn), (X,), SHAPES)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", TAKEN)
def test_what_moves_on_when_it_is_read_is_refused_with_its_line(kind, way):
    make, read = TAKEN[kind]
    held = make()
    model, loss_fn = way(held, read)
    with pytest.raises(
        UnsupportedOperatorError, match=r"the next value of .*(held|holder)"
    ) as caught:
        captured(model, loss_fn)
    assert caught.value.operators[0][1].startswith(__file__)
    assert "argument" in str(caught.value)
    before = next(iter(make()), None) if kind in ("iterator", "count", "generator") else None
    assert before is None or next(held) == before  # nothing was taken


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", DRAWN)
def test_random_numbers_of_an_object_are_refused(kind, way):
    make, read = DRAWN[kind]
    with pytest.raises(UnsupportedOperatorError, match=r"draws numbers from .*(held|holder)"):
        captured(*way(make(), read))


def test_tuples_and_partial_functions_are_as_they_were():
    held = itertools.count(), [1.0], itertools.count()
    part = functools.partial(lambda first, h: h * first[1][0], held)
    loss_fn = lambda m, x: part(distance(m, x)) * len(held)  # noqa: E731
    captured(nn.Linear(4, 4), loss_fn)
    assert part.args[0] is held and [next(held[0]), next(held[2])] == [0, 0]
    assert type(held[0]) is itertools.count


def test_an_event_of_a_thread_is_refused_with_its_line():
    event = threading.Event()
    with pytest.raises(UnsupportedOperatorError, match="asks event") as caught:
        captured(nn.Linear(4, 4), lambda m, x: distance(m, x) * (2 if event.is_set() else 1))
    assert caught.value.operators[0][1].startswith(__file__) and type(event) is threading.Event


@pytest.mark.parametrize("name", ["grad", "_version"])
def test_what_eager_tensors_alone_tell_is_refused_with_its_line(name):
    with pytest.raises(UnsupportedOperatorError, match=rf"\.{name}") as caught:
        captured(
            nn.Linear(4, 4), lambda m, x: distance(m, x) * (getattr(m.weight, name) is not None)
        )
    assert caught.value.operators[0][1].startswith(__file__)


def test_attributes_of_parameters_and_buffers_are_the_users():
    model: Any = nn.BatchNorm1d(4)
    model.weight.power, model.running_mean.power = 2, 3

    def loss_fn(model, x):
        power = model.weight.power + model.running_mean.power + getattr(model.bias, "power", 1)
        return model(x).pow(power).mean()

    guards = ValueGuards(captured(model, loss_fn).outer.guards)
    guards.check()
    for tensor in (model.weight, model.running_mean, model.bias):
        before = vars(tensor).copy()
        tensor.power = 7
        with pytest.raises(InputMismatchError, match=r"model\.\w+\.power"):
            guards.check()
        del tensor.power
        vars(tensor).update(before)
    guards.check()


def number_in(path):
    with open(path) as file:  # noqa: PTH123
        return float(file.read())


@pytest.mark.parametrize(
    "read",
    [
        number_in,
        lambda path: float(path.read_text()),
        lambda path: float(np.fromfile(path, dtype=np.uint8)[0]),
        lambda path: len(os.listdir(path.parent)),  # noqa: PTH208
    ],
)
def test_a_file_that_the_code_reads_must_stay_as_it_is(read, tmp_path):
    path = tmp_path / "weight"
    path.write_text("1")
    found = captured(nn.Linear(4, 4), lambda m, x: distance(m, x) * read(path)).outer.guards
    guards = ValueGuards(found)
    guards.check()
    path.write_text("10")
    (tmp_path / "another").write_text("")
    with pytest.raises(InputMismatchError, match=f"{tmp_path}.* was .* bytes"):
        guards.check()


def test_files_that_are_written_are_not_compared(tmp_path):
    def loss_fn(model, x):
        with (tmp_path / "log").open("a") as log:
            log.write("one step")
        return distance(model, x)

    found = captured(nn.Linear(4, 4), loss_fn).outer.guards
    assert not [guard for guard in found if str(tmp_path) in guard.what]


def test_a_count_that_a_function_keeps_is_told():
    def loss_fn(model, x):
        loss_fn.calls += 1
        return distance(model, x) * loss_fn.calls

    loss_fn.calls = 0
    with pytest.warns(RelaxDiscWarning, match=r"loss_fn\.calls is changed"):
        captured(nn.Linear(4, 4), loss_fn)
    assert loss_fn.calls == 0


SYSTEM = {
    "os": lambda: os.urandom(1)[0],
    "secrets": lambda: secrets.randbelow(9),
    "uuid": lambda: uuid.uuid4().int % 9,
    "SystemRandom": lambda: random.SystemRandom().random(),
    "Random without a seed": lambda: random.Random().random(),
    "Generator without a seed": lambda: float(np.random.default_rng().random()),
}


@pytest.mark.parametrize("kind", SYSTEM)
def test_random_numbers_of_the_system_are_refused(kind):
    with pytest.raises(UnsupportedOperatorError, match="asks the system for random numbers"):
        captured(nn.Linear(4, 4), lambda m, x: distance(m, x) * SYSTEM[kind]())


def test_what_a_step_makes_itself_may_be_read():
    weights, unread = [1.0, 2.0], [itertools.count(), numbers(), random.Random(0), filled()]

    def loss_fn(model, x):
        total = sum(a * b for a, b in zip(weights, weights, strict=True)) + sum(numbers())
        total += next(iter(weights)) + next(itertools.count(1)) + random.Random(0).random()
        total += float(np.random.default_rng(0).random()) + next(reversed(weights))
        return distance(model, x) * total if unread else x.sum()

    model = nn.Linear(4, 4)
    step = compiled(model, X, loss_fn=loss_fn)
    agree(step, loss_fn, model)
    assert [next(unread[0]), next(unread[1]), unread[3].get()] == [0, 1.0, 1.0]
    agree(step, loss_fn, model)


def test_what_the_code_keeps_is_the_object_afterwards():
    held, keeper = itertools.count(), functools.partial(int)

    def loss_fn(model, x):
        keeper.kept = held
        return distance(model, x)

    captured(nn.Linear(4, 4), loss_fn)
    assert next(keeper.kept) == 0 and next(held) == 1


def test_another_thread_takes_values_meanwhile():
    held, found = itertools.count(), []

    def loss_fn(model, x):
        thread = threading.Thread(target=lambda: found.append(next(held)))
        thread.start()
        thread.join()
        return distance(model, x)

    with pytest.warns(RelaxDiscWarning, match="found is changed"):
        captured(nn.Linear(4, 4), loss_fn).outer.warn(())
    assert next(held) == 1


clock = time.perf_counter
CLOCKS = {
    "time": lambda: time.time(),
    "imported": lambda: clock(),
    "integer": lambda: time.monotonic_ns(),
    "date": lambda: datetime.datetime.now().microsecond,
}


@pytest.mark.parametrize("kind", CLOCKS)
def test_a_clock_is_told_with_its_line(kind):
    with pytest.warns(RelaxDiscWarning, match=rf"{__file__}:\d+: .*\(\) .*runs once.*of the batch"):
        captured(nn.Linear(4, 4), lambda m, x: distance(m, x) * (CLOCKS[kind]() % 7 + 1))
    assert time.time is not None and type(time.time) is types.BuiltinFunctionType
    assert clock is time.perf_counter


def test_what_a_library_does_inside_is_its_own_affair(tmp_path, monkeypatch, recwarn):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "counting_library.py").write_text(
        "import itertools, os, time\n"
        "from torch import nn\n"
        "class Layer(nn.Linear):\n"
        "    names = itertools.count()\n"
        "    def forward(self, x):\n"
        "        next(self.names), next(self.calls), time.time(), os.environ.get('HOME')\n"
        "        return super().forward(x) if x.is_contiguous() else super().forward(x) * 1\n"
    )
    monkeypatch.syspath_prepend(folder)
    model = importlib.import_module("counting_library").Layer(4, 4)
    model.calls = itertools.count()
    step = compiled(model, X, loss_fn=distance)
    monkeypatch.setenv("HOME", "/elsewhere")
    agree(step, distance, model, X.t().contiguous().t())
    assert not [w for w in recwarn if w.category is RelaxDiscWarning]


ASKED = {
    "is_contiguous": lambda x: 2 if x.is_contiguous() else 1,
    "stride": lambda x: x.stride(0),
    "a view's": lambda x: 2 if x.t().is_contiguous() else 1,
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)).sum(),
}


@pytest.mark.parametrize("kind", ASKED)
def test_strides_that_the_loss_asks_for_are_fixed(kind):
    def loss_fn(model, x):
        return distance(model, x) * ASKED[kind](x)

    model, other = nn.Linear(4, 4), X.t().contiguous().t()
    step = compiled(model, X, loss_fn=loss_fn)
    agree(step, loss_fn, model)
    agree(step, loss_fn, model, X[2:5])
    with pytest.raises(InputMismatchError, match=rf"contiguous in .* and {__file__}:\d+ asks"):
        step(other)


def test_strides_of_an_example_that_is_not_contiguous():
    def loss_fn(model, x):
        return distance(model, x) * (2 if x.is_contiguous() else 1)

    model, example = nn.Linear(4, 4), X.t().contiguous().t()
    step = compiled(model, example, loss_fn=loss_fn)
    agree(step, loss_fn, model, example)
    with pytest.raises(InputMismatchError, match=r"of strides \(1, 8\) in the example"):
        step(X)


def test_a_place_in_storage_is_refused():
    with pytest.raises(UnsupportedOperatorError, match="storage_offset"):
        captured(nn.Linear(4, 4), lambda m, x: distance(m, x) * x.storage_offset())


def test_a_loss_over_all_parameters_takes_one_comparison_for_each_table():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(20)]
    model = nn.Sequential(*layers)

    def loss_fn(model, x):
        return distance(model, x) + sum(p.pow(2).sum() for p in model.parameters())

    guards = captured(model, loss_fn).outer.guards
    of_tables = [g for g in guards if g.part == "keys"]
    assert len(of_tables) == 2 * len(list(model.modules()))
    assert len(guards) - len(of_tables) < 80
