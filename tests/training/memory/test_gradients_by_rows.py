"""Gradients of a head and a table by rows: the same bits below the plain floor, within the plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import relax_disc
from relax_disc import FileTier
from relax_disc.errors import MemoryBudgetError
from relax_disc.pipeline import PipelineOptions
from relax_disc.vm_builtins import native
from tests.frontend.models import dims
from tests.tiers import every

CLASSES, WIDTH = 3000, 96  # a table of 1.1 MiB; four parts of 672 rows and one of 312
SHAPES = [(8, 48), (3, 17), (1, 1)]


class Model(nn.Module):
    """A table, a layer and a head with a bias, all apart."""

    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids, labels):
        x = self.table(ids)
        z = self.head(x + torch.tanh(self.layer(x)))
        return F.cross_entropy(z.reshape(-1, CLASSES), labels.reshape(-1), label_smoothing=0.1)


def batch(b, s):
    generator = torch.Generator().manual_seed(100 * b + s)
    ids, labels = torch.randint(0, CLASSES, (2, b, s), generator=generator)
    labels[:, s // 2 : s // 2 + s // 4] = -100
    return ids, labels


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Trained:
    """A step, and the state from which every run starts."""

    def __init__(self, make, options=None, tied=False, model: Any = Model, **settings: Any):
        torch.manual_seed(0)
        self.model = model(tied)
        self.optimizer = make(self.model.parameters())
        self.eager = copy.deepcopy((self.model, self.optimizer))
        b, s = dims()
        self.step = relax_disc.compile(
            *(self.model, self.optimizer, batch(2, 5)),
            dynamic_shapes=({0: b, 1: s}, {0: b, 1: s}),
            options=options,
            **settings,
        )
        self.step(*batch(4, 9))
        self._saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def run(self, shape, budget=None):
        """Loss, parameters and state after a step from the same state."""
        self.model.load_state_dict(self._saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self._saved[1]))
        self.step.memory_budget = budget
        found = [self.step(*batch(*shape)), *(p.detach().clone() for p in self.model.parameters())]
        for state in self.optimizer.state_dict()["state"].values():
            found += [torch.as_tensor(value).clone() for value in state.values()]
        return found

    def plan(self, shape, budget):
        self.step.memory_budget = budget
        return self.step.plan(b=shape[0], s=shape[1])


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "clipped": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


@pytest.fixture(scope="module", params=[*OPTIMIZERS, "adamw tied", "clipped tied"])
def trained(request):
    name, _, tied = request.param.partition(" ")
    settings = {"max_grad_norm": 0.01} if name == "clipped" else {}
    return Trained(OPTIMIZERS[name], tied=bool(tied), **settings)


@pytest.mark.parametrize("shape", every(2, SHAPES))
def test_every_budget_down_to_the_floor_gives_the_same_bits(trained, shape):
    expected, free = trained.run(shape), trained.plan(shape, None)
    floor = trained.plan(shape, 1).least_bytes
    variants = trained.step._variants
    with variants.only(variants.plain):
        assert floor < trained.plan(shape, 1).least_bytes
    for part in (0.0, 0.1, 0.5):
        budget = int(floor + part * (free.peak_bytes - floor))
        plan = trained.plan(shape, budget)
        assert plan.fits
        found = trained.run(shape, budget)
        assert same(found, expected)
        report = trained.step.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes == plan.peak_bytes <= budget
    assert trained.plan(shape, floor).by_rows
    with pytest.raises(MemoryBudgetError) as refusal:
        trained.run(shape, floor - 1)
    assert refusal.value.least_bytes == floor


def test_steps_by_rows_are_those_of_eager(trained):
    model, optimizer = copy.deepcopy(trained.eager)
    trained.model.load_state_dict(model.state_dict())
    trained.optimizer.load_state_dict(optimizer.state_dict())
    clip = trained.step.max_grad_norm
    for shape in SHAPES:
        trained.step.memory_budget = trained.plan(shape, 1).least_bytes
        loss = trained.step(*batch(*shape))
        optimizer.zero_grad()
        expected = model(*batch(*shape))
        expected.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        for mine, other in zip(trained.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_a_floor_with_a_folder_is_no_higher(trained, tmp_path):
    alone = trained.plan(SHAPES[0], 1).least_bytes
    expected = trained.run(SHAPES[0])
    trained.step.offload_to = FileTier(tmp_path, bytes_per_s=4e10)
    floor = trained.plan(SHAPES[0], 1).least_bytes
    assert floor <= alone
    found = trained.run(SHAPES[0], floor)
    trained.step.offload_to = None
    assert same(found, expected)


def test_state_in_a_file_is_updated_by_rows(tmp_path):
    plain = Trained(OPTIMIZERS["adamw"])
    kept = Trained(OPTIMIZERS["adamw"], offload_to=tmp_path, offload="optimizer")
    expected = plain.run(SHAPES[0])
    floor = kept.plan(SHAPES[0], 1).least_bytes
    assert kept.plan(SHAPES[0], floor).by_rows
    assert same(kept.run(SHAPES[0], floor), expected)
    assert kept.step.memory_report().peak_bytes <= floor


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of programs and of measurements; it keeps the native library."""
    native.load()
    monkeypatch.setenv("RELAX_DISC_CACHE", str(tmp_path))
    monkeypatch.delenv("RELAX_DISC_COMPILE_CACHE", raising=False)


@pytest.mark.usefixtures("cache")
def test_calibration_measures_both_ways():
    trained = Trained(OPTIMIZERS["adamw"])
    expected = trained.run(SHAPES[0])
    floor = trained.plan(SHAPES[0], 1).least_bytes
    modelled = trained.plan(SHAPES[0], floor).time_ratio
    assert modelled > 1
    trained.step.memory_budget = None
    trained.step.calibrate(*batch(*SHAPES[0]))
    assert set(trained.step.calibration.describe()["functions"]) == {"main", "main__by_rows"}
    floor = trained.plan(SHAPES[0], 1).least_bytes
    assert trained.plan(SHAPES[0], floor).time_ratio != modelled  # what was measured, noise too
    assert same(trained.run(SHAPES[0], floor), expected)


def test_clipping_keeps_no_gradient_of_a_table():
    trained = Trained(OPTIMIZERS["clipped"], max_grad_norm=0.01)
    state, floor = trained.plan((1, 1), None).state_bytes, trained.plan((1, 1), 1).least_bytes
    assert floor - state < 4 * CLASSES * WIDTH  # less than one of the two tables' gradients


def test_a_table_used_three_times_goes_by_rows():
    class Thrice(Model):
        def forward(self, ids, labels):
            x = self.table(ids) + self.layer(self.table(labels.clamp(min=0)))
            z = self.head(x)
            return F.cross_entropy(z.reshape(-1, CLASSES), labels.reshape(-1))

    trained = Trained(OPTIMIZERS["adamw"], tied=True, model=Thrice)
    expected, floor = trained.run(SHAPES[0]), trained.plan(SHAPES[0], 1).least_bytes
    assert trained.plan(SHAPES[0], floor).by_rows
    assert trained.plan(SHAPES[0], floor).whole_gradients == ()
    assert same(trained.run(SHAPES[0], floor), expected)


class InHalves(Model):
    """Whose logits are bfloat16."""

    def forward(self, ids, labels):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, labels)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("make", "model", "reason"),
    [
        (lambda p: torch.optim.Adafactor(p, lr=1e-2), Model, "of all its rows"),
        (OPTIMIZERS["adamw"], InHalves, "makes all of it"),
    ],
    ids=["whole norms", "bfloat16"],
)
def test_what_stays_whole_is_told_with_the_reason(make, model, reason, tied):
    trained = Trained(make, tied=tied, model=model)
    floor = trained.plan(SHAPES[0], 1).least_bytes
    told = {each.parameter: each for each in trained.plan(SHAPES[0], floor).whole_gradients}
    name = "table.weight" if tied else "head.weight"
    assert told[name].size_bytes == 4 * CLASSES * WIDTH
    assert reason in told[name].reason
    refused = str(trained.plan(SHAPES[0], floor - 1))
    assert f"the gradient of {name} (1.10 MiB) is not made by rows: " in refused
    assert "time x" not in refused  # nothing is known of it
    if tied or model is Model:
        assert set(told) == {name} if tied else {name, "table.weight"}
        assert not trained.plan(SHAPES[0], floor).by_rows
    expected = trained.run(SHAPES[0])
    assert same(trained.run(SHAPES[0], floor), expected)


@pytest.mark.usefixtures("cache")
def test_a_program_from_the_cache_tells_the_reason_too():
    plans = [Trained(OPTIMIZERS["adamw"], model=InHalves).plan(SHAPES[0], None) for _ in range(2)]
    assert plans[0].whole_gradients == plans[1].whole_gradients != ()


def test_the_option_leaves_it_out():
    whole = Trained(OPTIMIZERS["plain"], options=PipelineOptions(split_gradients=False))
    split = Trained(OPTIMIZERS["plain"])
    floors = [each.plan(SHAPES[0], 1).least_bytes for each in (whole, split)]
    assert floors[1] < floors[0]
    assert not whole.plan(SHAPES[0], floors[0]).by_rows
