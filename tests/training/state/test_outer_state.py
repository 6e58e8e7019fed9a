"""What a step reads besides its arguments, as far as the page does not show it."""

import copy
import ctypes
import dataclasses
import functools
import importlib
import math
import queue
import random
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from relax_disc.errors import InputMismatchError, UnsupportedOperatorError
from relax_disc.frontend.capture.state.live_number import LiveNumber
from relax_disc.frontend.capture.state.outer_state import OuterState
from relax_disc.frontend.capture.state.reachable import reachable
from relax_disc.frontend.capture.state.sources import resolve
from tests.training.state.outer_batch import X, agree, compiled


class Trainer:
    """A loss as a method of an object with settings, a counter and a network."""

    def __init__(self):
        self.weight, self.power, self.done = 0.5, 2, 0
        self.teacher = nn.Linear(4, 4)
        self.schedule = types.SimpleNamespace(scale=1.0)

    def loss(self, model, x):
        distance = (model(x) - self.teacher(x).detach()).pow(self.power).mean()
        return self.schedule.scale * distance * self.weight


def test_the_text_of_an_object_may_look_like_anything():
    """As Lightning's results, whose text begins with two braces."""

    class Part:
        scale = 0.5

        def __repr__(self):
            return "{{}}"

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def forward(self, x):
            return self.part.scale * x.pow(2).mean()

    model, holder = nn.Linear(4, 4), Holder()

    def loss_fn(model, x):
        return holder(model(x))

    step = compiled(model, X, loss_fn=loss_fn)
    agree(step, loss_fn, model)


def test_a_module_behind_a_weak_reference_is_read():
    """As Lightning's Trainer keeps the module that it trains."""

    class Scaled(nn.Linear):
        scale = 0.5

    model = Scaled(4, 4)
    holder = weakref.proxy(model)

    def loss_fn(model, x):
        return holder.scale * model(x).pow(2).mean()

    step = compiled(model, X, loss_fn=loss_fn)
    agree(step, loss_fn, model)
    model.scale = 2.0
    with pytest.raises(InputMismatchError, match=r"scale was 0\.5 .* is 2\.0 now"):
        step(X)


def test_a_method_reads_its_object():
    trainer, model = Trainer(), nn.Linear(4, 4)
    step = compiled(model, X, loss_fn=trainer.loss)
    trainer.weight, trainer.done, trainer.schedule.scale = 0.25, 1, 3.0
    with torch.no_grad():
        trainer.teacher.weight.mul_(2)
    agree(step, trainer.loss, model)
    trainer.power = 4
    with pytest.raises(InputMismatchError, match=r"power was 2 .* is 4 now"):
        step(X)
    trainer.power, trainer.teacher = 2, nn.Linear(4, 4)
    with pytest.raises(InputMismatchError, match="teacher was replaced"):
        step(X)


inner = 1.0  # has the name of an attribute, and nothing else in common with it


class HasInner(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).pow(2).mean()


def test_a_global_variable_that_has_the_name_of_an_attribute_is_not_read(monkeypatch):
    model = HasInner()
    step = compiled(model, X)
    monkeypatch.setitem(globals(), "inner", 2.0)
    torch.testing.assert_close(step(X), model(X).detach(), rtol=1e-4, atol=1e-5)


def test_a_partial_function_holds_tensors():
    scale, model = torch.tensor(2.0), nn.Linear(4, 4)
    loss_fn = functools.partial(lambda model, x, scale: (model(x) * scale).mean(), scale=scale)
    step = compiled(model, X, loss_fn=loss_fn)
    scale.fill_(5)
    agree(step, loss_fn, model)


class Uses(nn.Module):
    """A number in each kind of place where it may be read."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.number, self.function = nn.Linear(4, 4), 0.5, function

    def forward(self, x):
        return self.function(self.linear(x), self.number).sum()


LIVE = {
    "product": lambda h, n: h * n,
    "product from the left": lambda h, n: n * h,
    "difference from the left": lambda h, n: n - h,
    "quotient": lambda h, n: h / n,
    "reciprocal": lambda h, n: n / h.exp(),
    "in place": lambda h, n: (h * 2).mul_(n),
    "of numbers": lambda h, n: h * (1 - n) * (2 * n + 1) / -n,
    "comparison": lambda h, n: torch.where(h > n, h, 0.0),
    "integers": lambda h, n: h * (torch.arange(4) * n),
    "no axes": lambda h, n: h.mean() * n,
    "bounds": lambda h, n: torch.clamp(h, -n / 2, 1) + h.clamp(max=n) + h.clamp_min(n / 4),
}

FIXED = {
    "an argument": lambda h, n: F.dropout(h, n, training=False) * 1.0,
    "math": lambda h, n: h * __import__("math").exp(n),
    "a branch": lambda h, n: h * 2 if n < 0.6 else h * 3,
    "a factor": lambda h, n: torch.add(h, h, alpha=n),
    "a whole number": lambda h, n: h * int(n * 4),
    "a new tensor": lambda h, n: h * torch.full((4,), n),
}


@pytest.mark.parametrize("name", LIVE)
def test_arithmetic_stays_live(name):
    model = Uses(LIVE[name])
    step = compiled(model, X)
    for number in (0.5, 0.75, 0.2):
        model.number = number
        agree(step, lambda model, x: model(x), model)


@pytest.mark.parametrize("name", FIXED)
def test_other_uses_fix_a_number(name):
    model = Uses(FIXED[name])
    step = compiled(model, X)
    agree(step, lambda model, x: model(x), model)
    model.number = 0.75
    with pytest.raises(InputMismatchError, match=r"model\.number was 0\.5"):
        step(X)
    model.number = 0.5
    agree(step, lambda model, x: model(x), model)


class Inner(nn.Module):
    """A submodule with settings, read by a function of ``(h, n)``."""

    def __init__(self, function, number):
        super().__init__()
        self.inner, self.linear = Uses(function), nn.Linear(4, 4)
        self.inner.number, self.sizes = number, {"heads": 2}

    def forward(self, x):
        return self.inner(self.linear(x).unflatten(-1, (self.sizes["heads"], -1)).flatten(-2))


@pytest.mark.parametrize("numbers", [(2, 3, -1), (0.5, 0.75, 0.2)], ids=["integer", "float"])
def test_numbers_of_submodules_stay_live(numbers):
    for name in ("product", "of numbers", "quotient", "comparison", "no axes"):
        model = Inner(LIVE[name], numbers[0])
        step = compiled(model, X)
        for number in numbers:
            model.inner.number = number
            agree(step, lambda model, x: model(x), model)


WHOLE = {
    "a power": lambda h, n: h * n**-0.5,
    "a range": lambda h, n: sum(h * k for k in range(n)),
    "a slice": lambda h, n: h[:, :n],
    "a size": lambda h, n: h.expand(n, *h.shape),
    "a size made of it": lambda h, n: h.unflatten(-1, (n * 1, -1)),
    "an index": lambda h, n: (h, h * 2, h * 3)[n],
    "a division of sizes": lambda h, n: h * (h.shape[0] // n),
    "integers": lambda h, n: h * (torch.arange(4) + n),
    "a name": lambda h, n: h * {"2": 5.0, "3": 6.0}[f"{n}"],
    "a comparison": lambda h, n: h * min(3, n),
}


@pytest.mark.parametrize("name", WHOLE)
def test_other_uses_fix_an_integer(name):
    model = Inner(WHOLE[name], 2)
    step = compiled(model, X)
    agree(step, lambda model, x: model(x), model)
    model.inner.number = 3
    with pytest.raises(InputMismatchError, match=r"inner\.number was 2 .* is 3 now: compile again"):
        step(X)


def test_an_integer_that_a_loss_function_reads():
    epoch, model = 0, nn.Linear(4, 4)

    def loss_fn(model, x):
        return model(x).pow(2).mean() * (1 + epoch) / 2

    step = compiled(model, X, loss_fn=loss_fn)
    for epoch in (0, 1, 5):  # noqa: B007 - the function reads it
        agree(step, loss_fn, model)


def test_refusals_take_one_export(monkeypatch):
    exports = []
    export = torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda *a, **k: exports.append(1) or export(*a, **k)
    )
    for count, function in (
        (1, lambda h, n: int(h.sum()) * h * n),
        (1, lambda h, n: (h * n).unique_consecutive()),
        (2, lambda h, n: h * int((h * n).sum())),  # may be the number's fault
    ):
        with pytest.raises(UnsupportedOperatorError, match="data"):
            compiled(Uses(function), X)
        assert len(exports) == count
        exports.clear()


def test_what_refuses_a_stand_in_is_traced_with_the_number():
    def only_floats(h, n):
        return h * ctypes.c_double(n).value

    model = Uses(only_floats)
    step = compiled(model, X)
    model.number = 0.75
    with pytest.raises(InputMismatchError, match="number"):
        step(X)


@pytest.mark.parametrize(
    ("asks", "now", "said"),
    [
        (lambda n: n is None, None, r"model\.number was the number 0\.5 .* is None now"),
        (torch.is_tensor, torch.ones(()), r"model\.number was the number 0\.5"),
        (lambda n: isinstance(n, int), 1, r"asked the type, was of type float .* is 1 now"),
        (lambda n: type(n) is int, 1, r"asked the type, was of type float .* is 1 now"),
    ],
)
def test_what_a_number_is_may_be_asked_without_its_value(asks, now, said):
    model = Uses(lambda h, n: h * 2 if asks(n) else h)
    step = compiled(model, X)
    agree(step, lambda model, x: model(x), model)
    model.number = 0.25
    agree(step, lambda model, x: model(x), model)
    model.number = now
    with pytest.raises(InputMismatchError, match=said):
        step(X)


@pytest.mark.parametrize(
    "asks",
    [
        lambda model, x: type(x) is torch.Tensor and type(x.shape[0]) is int,
        lambda model, x: type(model.linear.weight) is nn.Parameter,
        lambda model, x: type(model.number) in (float,) and {float: 1}[type(model.number)],
        lambda model, x: type(nn.GELU) is type and type(model) is Uses and issubclass(Uses, object),
        lambda model, x: isinstance(type(x), type) and type("Made", (), {})().__class__ is not int,
    ],
)
def test_types_are_those_of_eager(asks):
    model = Uses(lambda h, n: h)
    assert asks(model, X)

    def loss_fn(model, x):
        return model(x) * (1.0 if asks(model, x) else 100.0)

    agree(compiled(model, X, loss_fn=loss_fn), loss_fn, model)


def test_a_number_becomes_no_tensor():
    model = Uses(LIVE["product"])
    step = compiled(model, X)
    model.number = None
    with pytest.raises(InputMismatchError, match=r"model\.number was the number 0\.5"):
        step(X)


def test_compile_changes_nothing():
    log, settings = [1], {"beta": 0.5, "names": ["a"]}
    model = Uses(LIVE["product"])
    before = {name: value for name, value in vars(model).items()}

    def loss_fn(model, x):
        settings["seen"] = x
        settings["names"].append("b")
        log.append(x)
        model.last = x
        return model(x) * settings["beta"]

    with pytest.warns(relax_disc.errors.RelaxDiscWarning):
        compiled(model, X, loss_fn=loss_fn)
    assert log == [1] and settings == {"beta": 0.5, "names": ["a"]}
    assert type(settings["beta"]) is float and type(model.number) is float
    assert vars(model) == before
    assert "__getattribute__" not in vars(nn.Module)


def test_another_thread_sees_numbers_meanwhile():
    settings, seen = {"beta": 0.5}, queue.SimpleQueue()

    def loss_fn(model, x):
        thread = threading.Thread(target=lambda: seen.put(torch.ones(2) * settings["beta"]))
        thread.start()
        thread.join()
        return model(x).mean() * settings["beta"]

    compiled(nn.Linear(4, 4), X, loss_fn=loss_fn)
    product = seen.get()
    assert type(product) is torch.Tensor and product.tolist() == [0.5, 0.5]


def test_accumulation_shares_what_is_outside():
    teacher, model = nn.Linear(4, 4), nn.Linear(4, 4)
    model.weight_of_it = 1.0

    def loss_fn(model, x):
        return F.mse_loss(model(x), teacher(x).detach()) * model.weight_of_it

    step = compiled(model, X, loss_fn=loss_fn)
    step(X, update=False)
    model.weight_of_it = 0.25
    with torch.no_grad():
        teacher.weight.mul_(3)
    expected = loss_fn(model, X).detach()
    torch.testing.assert_close(step(X, update=False), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step(X), expected, rtol=1e-4, atol=1e-5)


def test_sources_lead_back():
    trainer, model = Trainer(), Uses(LIVE["product"])
    known = OuterState(model, trainer.loss)._known
    for source, place in known.tensors.values():
        assert resolve(source, model, trainer.loss).get() is place.get(), source
    for source, place, _ in known.plain:
        assert resolve(source, model, trainer.loss).get() is place.get(), source
    names = {str(source) for source, _ in known.tensors.values()}
    assert any(name.endswith("teacher.weight") for name in names)


class Settings:
    gain = 2.0

    class Optimizer:
        decay = 0.5


class Configured(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.layer, self.settings = nn.Linear(4, 4), settings

    def forward(self, x):
        settings = self.settings["all"] if isinstance(self.settings, dict) else self.settings
        return (self.layer(x) * settings.gain).pow(2).mean() * settings.Optimizer.decay


@pytest.mark.parametrize("holder", ["attribute", "item"])
@pytest.mark.parametrize(("owner", "name"), [(Settings, "gain"), (Settings.Optimizer, "decay")])
def test_numbers_of_a_class_that_the_model_holds(holder, owner, name, monkeypatch):
    model = Configured(Settings if holder == "attribute" else {"all": Settings})
    step = compiled(model, X)
    before = step(X)
    monkeypatch.setattr(owner, name, 7.0)
    with pytest.raises(InputMismatchError, match=rf"{name} was .* and is 7\.0 now"):
        step(X)
    monkeypatch.undo()
    assert torch.equal(step(X), before)


def test_few_comparisons_a_call():
    """Some 40 ns each: 20 us are 500."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    from relax_disc.frontend import export_step

    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(12).reshape(2, 6)
    shapes = {key: {0: Dim("batch", min=1, max=8)} for key in ("input_ids", "labels")}
    batch = {"input_ids": ids, "labels": ids}
    exported = export_step(model, None, batch, dynamic_shapes=shapes)
    guards = exported.outer().guards
    assert 20 < len(guards) < 250
    assert any(guard.what.endswith("variance_epsilon") for guard in guards)


def test_settings_of_a_librarys_decorator_are_not_looked_at(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "decorating.py").write_text(
        "def counted(function, limit=3):\n"
        "    calls, level = 0, limit\n"
        "    def wrapper(*args):\n"
        "        nonlocal calls\n"
        "        calls += 1\n"
        "        return function(*args) if level else None\n"
        "    return wrapper\n"
    )
    monkeypatch.syspath_prepend(folder)
    scale = torch.tensor(2.0)
    decorated = importlib.import_module("decorating").counted(lambda model, x: model(x) * scale)
    found = reachable(nn.Linear(2, 2), decorated)
    assert {str(source) for source, _ in found.cells} == {"calls", "function", "scale"}
    assert [str(source) for source, _ in found.tensors.values()].count("scale") == 1


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy.random"])
def test_random_numbers_of_others_are_refused(draw):
    def loss(model, x):
        return model(x).sum() * float(draw())

    with pytest.raises(UnsupportedOperatorError, match=r"`(numpy\.)?random`"):
        compiled(nn.Linear(4, 3), X, loss_fn=loss)


class Reads(nn.Module):
    """A model that reads settings of many kinds."""

    def __init__(self, **settings):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        vars(self).update(settings)
        self.function = None

    def forward(self, x):
        return self.function(self, self.layer(x)).mean()


Setting = dataclasses.make_dataclass("Setting", [("power", int)])

READ = {
    "scalar": (
        {"power": np.int64(2)},
        lambda self, x: x.pow(int(self.power)),
        lambda self: setattr(self, "power", np.int64(3)),
    ),
    "array": (
        {"weights": np.array([1.0, 2.0, 3.0, 4.0], np.float32)},
        lambda self, x: x * torch.from_numpy(self.weights),
        lambda self: self.weights.__imul__(2),
    ),
    "array in a list": (
        {"parts": [np.array([2.0])]},
        lambda self, x: x * float(self.parts[0][0]),
        lambda self: self.parts[0].__imul__(2),
    ),
    "dataclass": (
        {"setting": Setting(2)},
        lambda self, x: x.pow(self.setting.power),
        lambda self: setattr(self.setting, "power", 3),
    ),
    "dict": (
        {"setting": {"power": 2}},
        lambda self, x: x.pow(self.setting["power"]),
        lambda self: self.setting.update(power=3),
    ),
    "list": (
        {"powers": [2, 3]},
        lambda self, x: x.pow(self.powers[0]) + x.pow(self.powers[1]),
        lambda self: self.powers.append(1),
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_a_setting_that_changes_is_used_or_refused(kind):
    settings, function, change = READ[kind]
    model = Reads(**copy.deepcopy(settings))
    model.function = function
    step = compiled(model, X)
    for key, value in settings.items():
        assert type(getattr(model, key)) is type(value)
    torch.testing.assert_close(step(X), model(X).detach())
    change(model)
    try:
        loss = step(X)
    except InputMismatchError as error:
        assert next(iter(settings)) in str(error)
    else:
        torch.testing.assert_close(loss, model(X).detach())


def test_whole_numbers_go_into_functions_of_math():
    pinned = []
    number = LiveNumber(4, ["width"], lambda *pin: pinned.append(pin), None)
    assert math.sqrt(number) == 2.0
    assert type(float(number)) is float
    assert f"{number}" == "4"
    assert pinned == [("width", True), ("width", True), ("width", False)]


def test_a_list_stays_the_users_own():
    powers = [2, 3]
    model = Reads(powers=powers)
    model.function = lambda self, x: x.pow(self.powers[0])
    step = compiled(model, X)
    assert model.powers is powers
    powers[0] = 4
    with pytest.raises(InputMismatchError, match=r"powers\[0\] was 2 .* is 4 now|powers was"):
        step(X)


def test_a_tensor_in_a_dict_may_be_replaced():
    model = Reads(state={"scale": torch.tensor([2.0])})
    model.function = lambda self, x: x * self.state["scale"]
    step = compiled(model, X)
    torch.testing.assert_close(step(X), model(X).detach())
    model.state["scale"] = torch.tensor([5.0])
    torch.testing.assert_close(step(X), model(X).detach())


class Remembers(nn.Module):
    """A prior whose factor lies by columns, and averages that are updated by hand."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.prior = torch.distributions.MultivariateNormal(torch.zeros(4), torch.eye(4) * 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        assert self.mean.grad is None  # as vector quantization asks of its codes
        rows = self.layer(x)
        if self.training:
            self.mean.data.lerp_(rows.detach().mean(0), 0.25)
        return (
            -self.prior.log_prob(rows).mean() + (rows - self.mean.detach().clone()).square().mean()
        )


def test_a_prior_by_columns_and_an_average_without_a_gradient():
    torch.manual_seed(0)
    model = Remembers()
    eager = copy.deepcopy(model)
    step = compiled(model, X)
    for _ in range(3):
        loss = step(X, update=False)
        torch.testing.assert_close(loss, eager(X).detach())
        torch.testing.assert_close(model.mean, eager.mean)


class ShowsItsWeights(nn.Module):
    """Keeps what it computed last, to be looked at."""

    def __init__(self):
        super().__init__()
        self.layer, self.weights = nn.Linear(4, 4), None

    def forward(self, x):
        rows = self.layer(x)
        self.weights = (rows @ rows.t()).softmax(-1)
        return (self.weights @ x).square().mean()


def test_what_a_run_before_has_left_fixes_no_size():
    torch.manual_seed(0)
    model = ShowsItsWeights()
    model(X)
    left = model.weights
    step = compiled(model, X)
    assert model.weights is left
    for rows in (X, X[:1], torch.randn(9, X.shape[1])):
        expected = model(rows)
        torch.testing.assert_close(step(rows), expected.detach())


class TwoNames(nn.Module):
    """Has a layer under two names, for which PyTorch's trace has stand-ins of all modules."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.again, self.inner = self.layer, nn.Module()
        self.inner.copies = 2

    def forward(self, x):
        return self.layer(x).expand(self.inner.copies, *x.shape).square().mean(0).sum()


def test_numbers_of_a_model_with_a_layer_under_two_names():
    model, x = TwoNames(), torch.randn(3, 4)
    shapes = ({0: Dim("rows", min=1, max=9)},)
    step = relax_disc.compile(model, None, (x,), dynamic_shapes=shapes)
    torch.testing.assert_close(step(x[:1], update=False), model(x[:1]).detach())
    model.inner.copies = 3
    with pytest.raises(InputMismatchError, match=r"model.inner.copies was 2"):
        step(x, update=False)
