"""Saved steps: they go on training, hold no weights, and a bad file is refused before it runs."""

import contextvars
import copy
import enum
import os
import random
import re

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim
from tvm import relax

import relax_disc
from relax_disc.errors import ArtefactError, InputMismatchError
from relax_disc.training.cache import artefact, saved_step


class Net(nn.Module):
    """Tied weights, a fixed number in the batch, a constant tensor, dropout and a buffer."""

    def __init__(self, width=8, rate=0.0):
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, batch, power=2):
        weights = torch.tensor([0.5, 1.5], dtype=torch.float32)
        hidden = self.drop(self.norm(self.table(batch["ids"])))
        loss = nn.functional.cross_entropy(self.head(hidden), batch["labels"])
        return loss + (hidden**power).mean() * weights.sum(), hidden


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, 11, (2, rows), generator=generator)
    return {"ids": ids, "labels": labels}


SHAPES = ({"ids": {0: Dim("rows", min=2, max=64)}, "labels": {0: Dim("rows", min=2, max=64)}}, None)


def make(width=8, rate=0.0, kind=torch.optim.AdamW):
    torch.manual_seed(0)
    model = Net(width, rate)
    return model, kind(model.parameters(), lr=1e-2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved step and what it was made of."""
    model, optimizer = make()
    step = relax_disc.compile(model, optimizer, (batch(4), 2), dynamic_shapes=SHAPES)
    step.memory_budget = "1GiB"
    step(batch(5), 2)
    path = tmp_path_factory.mktemp("saved") / "step.relax"
    step.save(path)
    return path, step, model, optimizer


def _unwanted(*_args, **_kwargs):
    raise AssertionError("a saved step is neither traced nor compiled")


def test_goes_on_training(saved, monkeypatch):
    path, step, model, optimizer = saved
    other, other_optimizer = make()
    for module, name in ((torch.export, "export"), (relax, "build"), (tvm, "compile")):
        monkeypatch.setattr(module, name, _unwanted)
    loaded = relax_disc.TrainingStep.load(path, other, other_optimizer)
    assert loaded.memory_budget == 2**30
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for rows in (2, 64, 7):
        mine, theirs = step(batch(rows, rows), 2), loaded(batch(rows, rows), 2)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1][0], theirs[1][0])
    for first, second in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(first, second)
    assert loaded.plan(rows=9) == step.plan(rows=9)


def test_can_be_saved_again(saved, tmp_path):
    path = saved[0]
    relax_disc.TrainingStep.load(path, *make()).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["again"]


def test_holds_no_weights(saved):
    path, _, model, optimizer = saved
    content = path.read_bytes()
    tensors = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
    for tensor in tensors:
        assert tensor.detach().numpy().tobytes()[:32] not in content


@pytest.fixture
def no_code(monkeypatch):
    """Fails the test when native code is loaded."""

    def refuse(content):
        raise AssertionError("native code was loaded")

    monkeypatch.setattr(artefact, "load_library", refuse)


def load(path, model=None, optimizer=None):
    made = make() if model is None else (model, optimizer)
    return relax_disc.TrainingStep.load(path, *made)


@pytest.mark.usefixtures("no_code")
def test_refuses_any_flipped_byte_and_any_cut(saved, tmp_path):
    content = saved[0].read_bytes()
    path = tmp_path / "bad"
    chosen = random.Random(0)
    places = [*range(64), *(chosen.randrange(len(content)) for _ in range(60)), len(content) - 1]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << chosen.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(ArtefactError):
            load(path)
    for size in (0, 5, 40, 60, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ArtefactError):
            load(path)
    path.write_bytes(content + b"x")
    with pytest.raises(ArtefactError, match="damaged"):
        load(path)
    with pytest.raises(ArtefactError, match="cannot be read"):
        load(tmp_path / "missing")


HEADERS = {
    "format": (lambda h: h.update(format=99), "format 99"),
    "version": (lambda h: h["versions"].update(tvm="0.1"), "tvm 0.1"),
    "processor": (lambda h: h["processor"]["features"].append("sve9"), "sve9"),
    "architecture": (lambda h: h["processor"].update(machine="riscv"), "riscv"),
}


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("kind", HEADERS)
def test_refuses_other_versions_and_processors(saved, tmp_path, kind):
    change, words = HEADERS[kind]
    header, parts = artefact.read(saved[0])
    change(header)
    del header["parts"]
    artefact.write(tmp_path / "other", header, parts)
    with pytest.raises(ArtefactError, match=words):
        load(tmp_path / "other")


def untied():
    model, _ = make()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model, torch.optim.AdamW(model.parameters())


def frozen():
    model, optimizer = make()
    model.norm.bias.requires_grad_(False)
    return model, optimizer


def double():
    model, optimizer = make()
    return model.double(), optimizer


def evaluating():
    model, optimizer = make()
    return model.eval(), optimizer


def grouped():
    model, _ = make()
    groups = [{"params": [p]} for p in model.parameters()]
    return model, torch.optim.AdamW(groups)


def edited():
    """As a file is that was edited between two runs: the same class, another forward."""
    model, optimizer = make()

    class Net(Net_):
        def forward(self, batch, power=2):
            hidden = self.drop(self.norm(self.table(batch["ids"])))
            loss = nn.functional.cross_entropy(self.head(hidden), batch["labels"])
            return loss + (hidden**power).mean(), hidden

    Net.__qualname__, Net.__module__ = Net_.__qualname__, Net_.__module__
    model.__class__ = Net
    return model, optimizer


Net_ = Net
MODELS = {
    "forward": (edited, "forward is not what it was"),
    "shape": (lambda: make(width=16), "table"),
    "setting": (lambda: make(rate=0.5), "drop"),
    "dtype": (double, "float64"),
    "tying": (untied, "head.weight"),
    "frozen": (frozen, "norm.bias"),
    "mode": (evaluating, "training"),
    "optimizer": (lambda: make(kind=torch.optim.SGD), "SGD"),
    "groups": (grouped, "parameter groups"),
}


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("kind", MODELS)
def test_refuses_another_model_or_optimizer(saved, kind):
    change, words = MODELS[kind]
    with pytest.raises(ArtefactError, match=re.escape(words)):
        load(saved[0], *change())


def test_refuses_another_loss_function(tmp_path):
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shapes = ({0: Dim("rows", min=1, max=9)},)
    path = tmp_path / "step.relax"
    relax_disc.compile(
        model, optimizer, (x,), dynamic_shapes=shapes, loss_fn=lambda m, x: m(x).pow(2).mean()
    ).save(path)
    same = relax_disc.TrainingStep.load(path, model, optimizer, lambda m, x: m(x).pow(2).mean())
    same(x)
    for other in (lambda m, x: m(x).pow(4).mean(), lambda m, x: -m(x).pow(2).mean()):
        with pytest.raises(ArtefactError, match="lambda> is not what it was"):
            relax_disc.TrainingStep.load(path, model, optimizer, other)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "step"
    path.write_bytes(b"old")

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(artefact.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        artefact.write(path, {"format": 1}, {})
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_refuses_to_save_what_json_cannot_hold(saved):
    _, step, model, optimizer = saved
    captured = copy.copy(step._captured)
    object.__setattr__(captured, "batch", copy.copy(captured.batch))
    object.__setattr__(captured.batch, "fixed", {2: object()})
    program = saved_step.Program(captured, step._executable)
    with pytest.raises(ArtefactError, match="cannot be saved"):
        saved_step.save("nowhere", {"step": program}, {}, model, optimizer)


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


class Settings:
    power = 2

    def __init__(self):
        self.mode, self.weights, self.scale = Mode.PLAIN, np.ones(2), torch.ones(2)


level = contextvars.ContextVar("level", default=1)
VARIABLE = "RELAX_DISC_TEST_OF_SAVED"


def relied_on():
    """A loss that reads state of many kinds, with what changes each and takes the change back."""
    settings, options, weights = Settings(), {}, {"first": 0.5}
    teacher = nn.Linear(4, 4)

    def loss_fn(model, x):
        loss = model(x).pow(settings.power).mean() * (1 if settings.mode is Mode.PLAIN else 2)
        loss = loss * getattr(settings, "extra", 1.0) * getattr(model, "gain", 1.0)
        loss = loss * options.get("alpha", 1.0) * float(settings.weights[0]) * level.get()
        loss = loss * int(os.environ[VARIABLE]) * int(os.getenv(f"{VARIABLE}_2", "1"))
        loss = loss * weights["first"] * (settings.scale.sum() if x.is_contiguous() else 1)
        return loss + sum(p.sum() for p in teacher.parameters() if p.requires_grad)

    extra = nn.Parameter(torch.ones(1))
    changes = {
        "extra": (lambda: setattr(settings, "extra", 2.0), lambda: delattr(settings, "extra")),
        "gain": (lambda m: setattr(m, "gain", 2.0), lambda m: delattr(m, "gain")),
        "alpha": (lambda: options.update(alpha=2.0), options.clear),
        "power": (lambda: setattr(settings, "power", 4), lambda: delattr(settings, "power")),
        "mode": (
            lambda: setattr(settings, "mode", Mode.DOUBLED),
            lambda: setattr(settings, "mode", Mode.PLAIN),
        ),
        "weights": (lambda: settings.weights.fill(2), lambda: settings.weights.fill(1)),
        "level": (lambda: level.set(2), lambda: level.set(1)),
        VARIABLE: (
            lambda: os.environ.update({VARIABLE: "2"}),
            lambda: os.environ.update({VARIABLE: "1"}),
        ),
        f"{VARIABLE}_2": (
            lambda: os.environ.update({f"{VARIABLE}_2": "2"}),
            lambda: os.environ.pop(f"{VARIABLE}_2"),
        ),
        "requires_grad": (
            lambda: teacher.bias.requires_grad_(False),
            lambda: teacher.bias.requires_grad_(True),
        ),
        "teacher": (
            lambda: teacher.register_parameter("extra", extra),
            lambda: delattr(teacher, "extra"),
        ),
    }
    return loss_fn, changes, weights


def test_a_loaded_step_relies_on_what_the_saved_one_does(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    loss_fn, changes, weights = relied_on()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(3, 4)
    shapes = ({0: Dim("rows", max=8)},)
    step = relax_disc.compile(model, optimizer, (x,), dynamic_shapes=shapes, loss_fn=loss_fn)
    step.save(tmp_path / "step")
    loaded = relax_disc.TrainingStep.load(tmp_path / "step", model, optimizer, loss_fn)
    assert len(loaded._guards) == len(step._guards)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "step").read_bytes()
    for call in (step, loaded):
        for name, (change, undo) in changes.items():
            of_model = (model,) if name == "gain" else ()
            change(*of_model)
            with pytest.raises(InputMismatchError, match=name):
                call(x)
            undo(*of_model)
            call(x)
        with pytest.raises(InputMismatchError, match="contiguous in the example"):
            call(torch.ones(4, 3).T)
        weights["first"] = 2.0  # live
        torch.testing.assert_close(call(x), loss_fn(model, x).detach())
        weights["first"] = 0.5
    for name in ("mode", "weights"):
        changes[name][0]()
        with pytest.raises(ArtefactError, match=f"{name} was .* when the saved step was compiled"):
            relax_disc.TrainingStep.load(tmp_path / "step", model, optimizer, loss_fn)
        changes[name][1]()


class Planned(nn.Module):
    """Holds lists in a tuple, as transformers' models do with their plans for several devices."""

    def __init__(self):
        super().__init__()
        self.linear, self.plan = nn.Linear(4, 4), {"head": (["x"], ["y"])}

    def forward(self, x):
        factor = 2 if "x" in self.plan["head"][0] else 3
        return (self.linear(x) * factor).pow(2).mean()


def test_lists_in_a_tuple_are_compared_by_value(tmp_path):
    models = Planned(), Planned()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    rows = {0: Dim("rows", min=1, max=16)}
    x = torch.randn(5, 4)
    step = relax_disc.compile(models[0], first, (x,), dynamic_shapes=(rows,))
    step.save(tmp_path / "step")
    loaded = relax_disc.TrainingStep.load(tmp_path / "step", models[1], second)
    torch.testing.assert_close(loaded(x), models[1](x).detach(), rtol=1, atol=10)
    models[1].plan["head"] = (["z"], ["y"])
    with pytest.raises(InputMismatchError, match="plan"):
        loaded(x)
