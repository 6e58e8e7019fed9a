"""A compiled step behaves as an eager step does, and refuses bad input before anything runs."""

from __future__ import annotations

import copy
import itertools
import signal
import threading

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import (
    InputMismatchError,
    MemoryBudgetError,
    NonFiniteLossError,
    ShapeRangeError,
    StepTornError,
)


class Regression(nn.Module):
    """Mean squared error of a small network over rows of any number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 1)

    def forward(self, x, y):
        return (self.second(torch.tanh(self.first(x)))[:, 0] - y).pow(2).mean()


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, generator=generator)


SHAPES = ({0: Dim("rows", min=1, max=64)}, {0: Dim("rows", min=1, max=64)})


def make(optimizer_of, seed=0):
    torch.manual_seed(seed)
    model = Regression()
    optimizer = optimizer_of(model)
    return model, optimizer


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@pytest.fixture(scope="module")
def compiled():
    """One AdamW step for the tests that leave it usable."""
    model, optimizer = make(adamw)
    return model, optimizer, relax_disc.compile(model, optimizer, batch(4), dynamic_shapes=SHAPES)


def eager_step(model, optimizer, args, max_norm=None):
    optimizer.zero_grad()
    loss = model(*args)
    loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.detach()


def twin(model, optimizer_of):
    other = copy.deepcopy(model)
    return other, optimizer_of(other)


OPTIMIZERS = {
    "adamw": adamw,
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.1),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, weight_decay=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, dampening=0.5),
    "groups": lambda m: torch.optim.SGD(
        [{"params": m.first.parameters()}, {"params": m.second.parameters(), "lr": 1e-3}],
        lr=1e-2,
        momentum=0.9,
        nesterov=True,
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_follows_eager_over_shapes_and_steps(kind):
    model, optimizer = make(OPTIMIZERS[kind])
    other, other_optimizer = twin(model, OPTIMIZERS[kind])
    step = relax_disc.compile(model, optimizer, batch(4), dynamic_shapes=SHAPES)
    for seed, rows in enumerate((1, 64, 5, 2)):
        loss = step(*batch(rows, seed))
        expected = eager_step(other, other_optimizer, batch(rows, seed))
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=1e-7)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)
    mine, theirs = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert {k: set(v) for k, v in mine.items()} == {k: set(v) for k, v in theirs.items()}
    for index, state in theirs.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(mine[index][key], value, rtol=1e-4, atol=1e-6)


def test_scheduler_and_loading_take_effect():
    model, optimizer = make(adamw)
    other, other_optimizer = twin(model, adamw)
    step = relax_disc.compile(model, optimizer, batch(4), dynamic_shapes=SHAPES)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, other_optimizer)]
    for seed in range(3):
        step(*batch(7, seed))
        eager_step(other, other_optimizer, batch(7, seed))
        for scheduler in schedulers:
            scheduler.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(*batch(3, 9))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    again = step(*batch(3, 10))
    expected = eager_step(other, other_optimizer, batch(3, 10))
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-6)
    assert int(next(iter(optimizer.state.values()))["step"]) == 4


def test_follows_a_moved_parameter(compiled):
    model, _, step = compiled
    step(*batch(3))
    model.first.weight.data = model.first.weight.data.clone()
    before = model.first.weight.detach().clone()
    step(*batch(3))
    assert not torch.equal(before, model.first.weight)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda w: w.data[:1], r"first.weight changed its shape from"),
        (lambda w: w.data.as_strided(w.shape, (1, w.shape[0])), r"first.weight has strides"),
    ],
)
def test_a_parameter_that_changed_where_it_is_is_not_read_as_it_was(compiled, changed, said):
    model, _, step = compiled
    step(*batch(3))
    step(*batch(3))
    before = model.first.weight.data
    model.first.weight.data = changed(model.first.weight)
    with pytest.raises(InputMismatchError, match=said):
        step(*batch(3))
    model.first.weight.data = before
    step(*batch(3))


def test_raises_the_version_of_what_it_writes(compiled):
    model, _, step = compiled
    before = model.first.weight._version
    step(*batch(3))
    assert model.first.weight._version > before


def test_clips_the_global_norm():
    model, optimizer = make(adamw)
    other, other_optimizer = twin(model, adamw)
    step = relax_disc.compile(model, optimizer, batch(4), dynamic_shapes=SHAPES, max_grad_norm=0.05)
    for seed in range(3):
        step(*batch(11, seed))
        eager_step(other, other_optimizer, batch(11, seed), max_norm=0.05)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=5e-6)


BAD = {
    "rank": (lambda x, y: (x[0], y), InputMismatchError, "rank 2"),
    "dtype": (lambda x, y: (x.double(), y), InputMismatchError, "float32"),
    "missing": (lambda x, y: (x,), InputMismatchError, "lacks y; the step was compiled for x, y"),
    "too many": (lambda x, y: (x, y, y), InputMismatchError, "3 arguments"),
    "a list": (lambda x, y: (x, y.tolist()), InputMismatchError, "y must be a tensor.*got list"),
    "type": (lambda x, y: (x.numpy(), y), InputMismatchError, "torch.Tensor"),
    "fixed dim": (lambda x, y: (x[:, :5], y), ShapeRangeError, "expected 6"),
    "too long": (lambda x, y: (x.repeat(40, 1), y.repeat(40)), ShapeRangeError, "1 .. 64"),
    "empty": (lambda x, y: (x[:0], y[:0]), ShapeRangeError, "1 .. 64"),
    "contradiction": (lambda x, y: (x, y[:-1]), ShapeRangeError, "rows"),
}


@pytest.mark.parametrize("kind", BAD)
def test_refuses_bad_input_and_goes_on(compiled, kind):
    model, optimizer, step = compiled
    change, error, words = BAD[kind]
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    with pytest.raises(error, match=words):
        step(*change(*batch(4)))
    after = (model.state_dict(), optimizer.state_dict()["state"])
    for name, value in before[0].items():
        assert torch.equal(value, after[0][name])
    assert float(before[1][0]["step"]) == float(after[1][0]["step"])
    assert torch.isfinite(step(*batch(4)))


def test_arguments_by_place_or_by_name(compiled):
    _, _, step = compiled
    x, y = batch(4)
    with step.restored():
        first = step(x, y)
    with step.restored():
        assert torch.equal(step(y=y, x=x), first)
    with step.restored():
        assert torch.equal(step(x, y=y), first)
    with pytest.raises(InputMismatchError, match="x twice"):
        step(x, x=x, y=y)
    with pytest.raises(InputMismatchError, match="has z too"):
        step(x, y=y, z=y)


def test_refuses_changed_parameters():
    model, optimizer = make(adamw)
    step = relax_disc.compile(model, optimizer, batch(4), dynamic_shapes=SHAPES)
    model.first.weight.requires_grad_(False)
    with pytest.raises(InputMismatchError, match=r"first\.weight was trained .* is frozen now"):
        step(*batch(4))
    model.double().float()  # new memory, which is bound in the same call
    with pytest.raises(InputMismatchError, match=r"first\.weight was trained .* is frozen now"):
        step(*batch(4))
    model.first.weight.requires_grad_(True)
    saved = copy.deepcopy(model.state_dict())
    old = dict(model.named_parameters())
    model.load_state_dict(saved, assign=True)
    with pytest.raises(InputMismatchError, match="assign=True"):
        step(*batch(4))
    for name in ("first", "second"):
        for leaf in ("weight", "bias"):
            setattr(getattr(model, name), leaf, old[f"{name}.{leaf}"])
    step(*batch(4))
    model.double()
    with pytest.raises(InputMismatchError, match="dtype"):
        step(*batch(4))
    model.float()
    step(*batch(4))
    model.eval()
    with pytest.raises(InputMismatchError, match=r"train\(\)"):
        step(*batch(4))
    model.train()
    model.first = nn.Linear(6, 16)
    with pytest.raises(InputMismatchError, match="first"):
        step(*batch(4))


def test_accepts_strided_batches(compiled):
    _, _, step = compiled
    x, y = batch(8)
    assert torch.isfinite(step(x.T.contiguous().T, y))
    assert torch.isfinite(step(x[1:], y[1:]))


def test_the_least_budget_is_searched_for_when_it_is_asked_for(compiled):
    _, _, step = compiled
    before = step.session.counters().plans
    plan = step.plan(rows=37)
    assert "rows=37" in str(plan) and plan.fits
    assert step.session.counters().plans == before + 1
    assert plan.least_bytes <= plan.peak_bytes
    searched = step.session.counters().plans
    assert searched == before + 2
    assert plan.least_bytes == step.plan(rows=37).least_bytes
    assert step.session.counters().plans == searched


def test_budget_holds_or_is_refused(compiled):
    model, _, step = compiled
    plan = step.plan(rows=64)
    with pytest.raises(InputMismatchError, match="float"):
        step.memory_budget = 0.5
    step.memory_budget = 1000
    before = model.first.weight.detach().clone()
    with pytest.raises(MemoryBudgetError) as caught:
        step(*batch(64))
    assert 1000 < caught.value.lower_bound_bytes <= caught.value.least_bytes <= plan.peak_bytes
    assert caught.value.least_bytes == plan.least_bytes
    assert f"the least found feasible is {plan.least_bytes} bytes" in str(caught.value)
    assert str(caught.value).endswith("or name where to offload tensors to (offload_to).")
    assert torch.equal(before, model.first.weight)
    step.memory_budget = caught.value.least_bytes
    assert step.plan(rows=64).fits
    step(*batch(64))
    report = step.memory_report()
    assert report.peak_bytes <= caught.value.least_bytes
    assert report.peak_bytes == report.planned_peak_bytes
    assert step.largest("rows") == 64
    assert step.largest("rows", memory_budget=step.plan(rows=20).peak_bytes) >= 20
    step.memory_budget = None
    assert step.plan(rows=64) == plan


def test_threads_take_turns(compiled):
    _, _, step = compiled
    losses, errors = [], []

    def work(seed):
        try:
            losses.append(float(step(*batch(1 + seed, seed))))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(losses) == 6


def test_interrupt_waits_for_the_step(compiled):
    _, optimizer, step = compiled
    step(*batch(4))
    counts = itertools.count(int(optimizer.state_dict()["state"][0]["step"]))
    next(counts)
    original = step._call

    def call(*args):
        signal.raise_signal(signal.SIGINT)
        return original(*args)

    step._call = call
    with pytest.raises(KeyboardInterrupt):
        step(*batch(4))
    step._call = original
    assert int(optimizer.state_dict()["state"][0]["step"]) == next(counts)
    assert torch.isfinite(step(*batch(4)))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGALRM"])
def test_handlers_that_raise_wait_for_the_step(compiled, name):
    """A cluster's signal before the end, a limit of time."""
    _, optimizer, step = compiled
    number = getattr(signal, name)
    step(*batch(4))
    original, before = step._call, int(optimizer.state_dict()["state"][0]["step"])
    seen = []

    def leave(*_):
        seen.append(int(optimizer.state_dict()["state"][0]["step"]))
        raise SystemExit(3)

    def call(*args):
        result = original(*args)
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGINT)
        return result

    handler = signal.signal(number, leave)
    step._call = call
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            step(*batch(4))
        assert signal.getsignal(number) is leave
    finally:
        step._call = original
        signal.signal(number, handler)
    assert seen == [before + 1]
    assert torch.isfinite(step(*batch(4)))


class Tagger(nn.Module):
    """Cross-entropy of an embedding's linear readout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.readout = nn.Linear(8, 5)

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.readout(self.table(ids)), labels)


def test_refuses_ids_outside_the_vocabulary():
    torch.manual_seed(0)
    model = Tagger()
    rows = Dim("rows", min=1, max=64)
    ids, labels = torch.arange(6), torch.arange(6) % 5
    step = relax_disc.compile(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (ids, labels),
        dynamic_shapes=({0: rows}, {0: rows}),
    )
    with pytest.raises(ShapeRangeError, match=r"ids must be in 0 .. 9"):
        step(ids + 5, labels)
    with pytest.raises(ShapeRangeError, match=r"\[3\] is -7"):
        step(ids, torch.where(torch.arange(6) == 3, -7, labels))
    ignored = step(ids, torch.where(torch.arange(6) == 3, -100, labels))
    assert torch.isfinite(ignored)


def test_torn_step_asks_for_loading(monkeypatch):
    model, optimizer = make(adamw)
    step = relax_disc.compile(model, optimizer, batch(4), dynamic_shapes=SHAPES)
    step(*batch(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def call(*args):
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(step, "_call", call)
        patch.setattr(type(step._variants), "torn", True)
        with pytest.raises(StepTornError, match="a kernel failed"):
            step(*batch(4))
    with pytest.raises(StepTornError, match="not been loaded"):
        step(*batch(4))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert torch.isfinite(step(*batch(4)))


def test_forward_function_runs_at_every_shape():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).eval()
    forward = relax_disc.compile_forward(
        model, (torch.randn(4, 6),), dynamic_shapes=({0: Dim("rows", min=1, max=32)},)
    )
    for rows in (1, 32, 7):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(forward(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "groups"])
def test_refuses_a_loss_that_is_not_finite_when_asked(kind):
    model, optimizer = make(OPTIMIZERS[kind])
    step = relax_disc.compile(model, optimizer, batch(4), dynamic_shapes=SHAPES)
    step(*batch(3))
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(5)
    step.check_finite = True
    with pytest.raises(NonFiniteLossError, match="nan"):
        step(x, y * float("nan"))
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert torch.isfinite(step(x, y))
    step.check_finite = False
    assert torch.isnan(step(x, y * float("nan")))


@pytest.mark.parametrize("ids_first", [True, False])
def test_a_size_that_is_declared_as_one_less_is_not_taken_for_the_dim(ids_first):
    """Log-probabilities of the next token, given beside the ids, as in PPO."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))

    def ratio(model, ids, old):
        new = model(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
        return (new.squeeze(2) - old).exp().mean()

    def batch(length):
        pair = torch.arange(3 * length).reshape(3, length) % 9, torch.zeros(3, length - 1)
        return pair if ids_first else pair[::-1]

    rows, length = Dim("rows", min=1, max=8), Dim("length", min=2, max=16)
    shapes = {0: rows, 1: length}, {0: rows, 1: length - 1}
    loss_fn = ratio if ids_first else lambda model, old, ids: ratio(model, ids, old)
    step = relax_disc.compile(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        batch(9),
        dynamic_shapes=shapes if ids_first else shapes[::-1],
        loss_fn=loss_fn,
    )
    for size in (2, 9, 16):
        torch.testing.assert_close(step(*batch(size)), loss_fn(model, *batch(size)).detach())
        assert step.shape_of(*batch(size)) == {"rows": 3, "length": size}
        assert step.plan(rows=3, length=size).peak_bytes == step.memory_report().peak_bytes
    with pytest.raises(ShapeRangeError):
        step(*batch(17))


@pytest.mark.slow
def test_a_norm_over_two_hundred_parameters_is_clipped():
    """A stack of 8 MB was too small for one expression with a number of every parameter."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(100)]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, twin)]
    step = relax_disc.compile(
        model,
        optimizers[0],
        (torch.randn(4, 8),),
        dynamic_shapes=({0: Dim("rows", min=1, max=64)},),
        loss_fn=lambda m, x: m(x).square().sum(),
        max_grad_norm=0.1,
    )
    for rows in (64, 1, 7):
        x = torch.randn(rows, 8)
        loss = twin(x).square().sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(step(x), loss.detach())
        torch.testing.assert_close(step.gradient_norm, norm)
        assert norm > 0.1
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class Chain(nn.Module):
    """As PyTorch Geometric's Sequential: each object has a forward, and gives it to its class."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.forward = lambda x: self.linear(x).square().mean()
        type(self).forward = lambda self, x: self.forward(x)


def test_a_forward_of_the_object_itself_counts_alone():
    model, x = Chain(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = Dim("rows", min=1, max=9)
    step = relax_disc.compile(model, optimizer, (x,), dynamic_shapes=({0: rows},))
    expected = model(x).detach()
    Chain()
    torch.testing.assert_close(step(x), expected)
    model.forward = lambda x: x.sum()
    with pytest.raises(InputMismatchError, match="forward of"):
        step(x)
