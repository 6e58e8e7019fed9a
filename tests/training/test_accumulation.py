"""Gradient accumulation: like eager's, like one batch of the whole size, in the step's memory."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc import compiler
from relax_disc.errors import (
    InputMismatchError,
    MemoryBudgetError,
    NonFiniteLossError,
    OutOfMemoryError,
    StepTornError,
)
from relax_disc.vm_builtins import native


class Net(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 1)
        self.rate = rate

    def forward(self, x):
        hidden = nn.functional.dropout(torch.tanh(self.first(x)), self.rate)
        return (self.second(hidden) - 1).square().mean()


def quarter(model, x):
    return model(x) / 4


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, dampening=0.5),
}


def make(kind="adamw", rate=0.0, loss_fn=quarter, **options):
    torch.manual_seed(0)
    model = Net(rate)
    optimizer = OPTIMIZERS[kind](model.parameters())
    shapes = ({0: Dim("rows", min=1, max=64)},)
    args = (torch.randn(4, 6),)
    return relax_disc.compile(
        model, optimizer, args, dynamic_shapes=shapes, loss_fn=loss_fn, **options
    )


def batches(count, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 6, generator=generator) for _ in range(count)]


def close(first, second):
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("kind", "norm"), [("adamw", None), ("momentum", 0.05)])
def test_follows_eager_accumulation(kind, norm):
    step = make(kind, max_grad_norm=norm)
    model = copy.deepcopy(step.model)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for round_number in range(3):
        parts = batches(4, 3 + round_number, round_number)
        for k, x in enumerate(parts):
            loss = step(x, update=k == 3)
            expected = quarter(model, x)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        if norm is not None:
            total = nn.utils.clip_grad_norm_(model.parameters(), norm)
            torch.testing.assert_close(step.gradient_norm, total, rtol=1e-4, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        close(step.model, model)
        assert all(p.grad is None for p in step.model.parameters())
    step(parts[0])  # and on without accumulation
    quarter(model, parts[0]).backward()
    if norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()
    close(step.model, model)


class Mixed(nn.Module):
    """A frozen layer, a buffer that changes, and a layer that only some of the loss needs."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.frozen(x)))).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_follows_eager_with_buffers_groups_and_frozen_layers(dtype):
    torch.manual_seed(0)
    model = Mixed().to(dtype)

    def optimizer_of(model):
        return torch.optim.SGD(
            [
                {"params": model.norm.parameters(), "lr": 1e-2, "nesterov": True},
                {"params": [*model.last.parameters(), *model.unused.parameters()]},
            ],
            lr=1e-3,
            momentum=0.9,
            weight_decay=0.1,
        )

    twin = copy.deepcopy(model)
    optimizer, theirs = optimizer_of(model), optimizer_of(twin)
    shapes = ({0: Dim("rows", min=2, max=64)},)
    parts = [x.to(dtype) for x in batches(3, 9)]
    step = relax_disc.compile(model, optimizer, (parts[0],), dynamic_shapes=shapes)
    for _ in range(2):
        for k, x in enumerate(parts):
            step(x, update=k == 2)
            twin(x).backward()
        theirs.step()
        theirs.zero_grad()
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    )
    for (name, mine), other in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, other, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
    assert "momentum_buffer" not in optimizer.state[model.unused.weight]


def test_four_batches_equal_one_of_four_times_the_size():
    parts = batches(4, 5)
    step, whole = make(), make(loss_fn=None)
    for _ in range(3):
        for k, x in enumerate(parts):
            step(x, update=k == 3)
        whole(torch.cat(parts))
    close(step.model, whole.model)


def test_cleared_gradients_are_forgotten():
    step, twin = make(), make()
    x, y = batches(2, 5)
    step(x, update=False)
    step.optimizer.zero_grad()
    assert torch.equal(step(y), twin(y))
    for mine, theirs in zip(step.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_draws_one_sequence_of_random_numbers():
    step = make(rate=0.5)
    start = step.rng_state
    (x,) = batches(1, 5)
    losses = [step(x, update=False).item() for _ in range(2)]
    assert losses[0] != losses[1]
    assert step.rng_state.tolist() == [start[0].item(), start[1].item() + 2]
    step.rng_state = start
    assert [step(x, update=False).item() for _ in range(2)] == losses


def test_a_model_that_changed_is_not_compiled():
    step = make(rate=0.5)
    (x,) = batches(1, 5)
    step.model.eval()
    with pytest.raises(InputMismatchError, match="mode"):
        step(x, update=False)
    step.model.train()
    step.model.first.bias.requires_grad_(False)
    with pytest.raises(InputMismatchError, match="trained"):
        step.plan(update=False, rows=5)
    step.model.first.bias.requires_grad_(True)
    assert step(x, update=False) != step(x, update=False)


def test_keeps_to_the_budget_and_refuses_bad_losses():
    step = make()
    (x,) = batches(1, 64)
    step.memory_budget = 2000
    with pytest.raises(MemoryBudgetError):
        step(x, update=False)
    assert all(p.grad is None for p in step.model.parameters())
    step.memory_budget = "1MiB"
    step(x, update=False)
    step.check_finite = True
    before = step.model.first.weight.grad.clone()
    with pytest.raises(NonFiniteLossError):
        step(x * float("nan"), update=False)
    assert torch.equal(before, step.model.first.weight.grad)
    step(x)


def gradient_bytes(step):
    return sum(p.numel() * p.element_size() for p in step.model.parameters())


def test_sums_count_as_resident_memory_while_they_are_there():
    step = make()
    (x,) = batches(1, 7)
    plain = step.plan(rows=7)
    adding = step.plan(update=False, rows=7)
    assert all(p.grad is None for p in step.model.parameters())
    assert adding.resident_bytes - plain.resident_bytes == gradient_bytes(step) + 8
    assert step.plan(rows=7) == plain
    step(x, update=False)
    report = step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes == adding.peak_bytes
    assert report.state_bytes == plain.state_bytes
    updating = step.plan(rows=7)
    assert updating.resident_bytes - plain.resident_bytes == gradient_bytes(step) + 8
    kept = weakref.ref(step.model.first.weight.grad)
    step(x)
    report = step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes == updating.peak_bytes
    assert kept() is None
    assert step.plan(rows=7) == plain
    step(x)
    assert step.memory_report().peak_bytes == plain.peak_bytes


def test_all_functions_share_one_arena_and_one_budget():
    step = make()
    x, small = torch.ones(64, 6), torch.ones(2, 6)
    step(x)
    held = step.session.counters().held_bytes
    step(small, update=False)
    assert step.memory_report().held_bytes == held
    step(small)
    assert step.memory_report().held_bytes == held
    step.memory_budget = "2MB"
    for update in (False, True):
        step(x, update=update)
        assert step.memory_report().budget_bytes == 2 * 10**6
    step.memory_budget = None
    step(x, update=False)
    room = step.plan(rows=64).peak_bytes
    assert step.largest("rows", memory_budget=room) == 64
    assert step.largest("rows", memory_budget=room - 1) < 64
    step.optimizer.zero_grad()
    assert step.largest("rows", memory_budget=room - 1) == 64


def test_is_compiled_once_and_only_when_it_is_used(tmp_path, monkeypatch):
    native.load()
    monkeypatch.setenv("RELAX_DISC_CACHE", str(tmp_path))
    monkeypatch.delenv("RELAX_DISC_COMPILE_CACHE", raising=False)
    builds = []
    original = compiler.build
    monkeypatch.setattr(compiler, "build", lambda *a: builds.append(1) or original(*a))
    step = make()
    step(torch.ones(3, 6))
    assert len(builds) == 1
    for rows in (3, 9):
        step(torch.ones(rows, 6), update=False)
        step(torch.ones(rows, 6))
    assert len(builds) == 2
    again = make()
    again(torch.ones(3, 6), update=False)
    assert len(builds) == 2


def test_what_failed_half_way_must_be_cleared(monkeypatch):
    step = make()
    (x,) = batches(1, 5)
    step(x, update=False)
    adding = step.accumulation.known()[0]

    class TornSession:
        torn = True

        def __getattr__(self, name):
            return getattr(session, name)

    def fail(*_):
        raise RuntimeError("a kernel failed")

    session = adding._session
    with monkeypatch.context() as patch:
        patch.setattr(adding, "_session", TornSession())
        patch.setattr(adding, "_call", fail)
        with pytest.raises(StepTornError, match="zero_grad"):
            step(x, update=False)
    for update in (True, False):
        with pytest.raises(StepTornError, match="first_weight_grad"):
            step(x, update=update)
    step.model.zero_grad(set_to_none=False)
    step(x)


def test_a_failure_before_anything_was_written_leaves_no_gradient(monkeypatch):
    step = make()
    (x,) = batches(1, 5)
    step.plan(update=False, rows=5)

    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(step.accumulation.known()[0], "_call", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            step(x, update=False)
    assert all(p.grad is None for p in step.model.parameters())
    step(x)


def test_sums_that_find_no_memory_leave_nothing_behind(monkeypatch):
    step = make()
    (x,) = batches(1, 5)
    step.plan(update=False, rows=5)
    made = []

    def refuse(*args, **options):
        made.append(1)
        if len(made) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return original(*args, **options)

    original = torch.zeros_like
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", refuse)
        with pytest.raises(OutOfMemoryError, match="sums of gradients"):
            step(x, update=False)
    assert all(p.grad is None for p in step.model.parameters())
    step(x)


def test_gradients_that_are_not_dense_are_refused():
    step = make()
    weight = step.model.first.weight
    weight.grad = weight.detach().to_sparse()
    with pytest.raises(InputMismatchError, match="clear it"):
        step(torch.ones(3, 6), update=False)


def least(step, update, **shape):
    """The least budget that the planner finds for a call."""
    unlimited = step.memory_budget
    step.memory_budget = step.plan(update=update, **shape).resident_bytes + 1
    found = step.plan(update=update, **shape).least_bytes
    step.memory_budget = unlimited
    return found


class Deep(nn.Module):
    """Layers whose activations are worth giving up."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
        return x.square().mean()


def test_results_are_bit_identical_at_every_budget():
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shapes = ({0: Dim("rows", min=1, max=512)},)
    args = (torch.randn(4, 32),)
    step = relax_disc.compile(model, optimizer, args, dynamic_shapes=shapes, max_grad_norm=0.01)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    sizes = [300, 511, 120, 400]

    def train(fraction):
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
        losses, again = [], 0
        for k, rows in enumerate(sizes):
            update = k == len(sizes) - 1
            step.memory_budget = None
            high = step.plan(update=update, rows=rows).peak_bytes
            low = least(step, update, rows=rows)
            if fraction is not None:
                step.memory_budget = int(low + fraction * (high - low))
            generator = torch.Generator().manual_seed(k)
            losses.append(step(torch.randn(rows, 32, generator=generator), update=update))
            report = step.memory_report()
            assert report.peak_bytes == report.planned_peak_bytes <= (step.memory_budget or high)
            again += report.recomputations
        step.memory_budget = None
        return [*losses, *(p.detach().clone() for p in model.parameters())], again

    free, none = train(None)
    assert none == 0
    for fraction in (0.0, 0.3, 0.7):
        tight, recomputations = train(fraction)
        assert recomputations > 0
        assert all(map(torch.equal, free, tight))


def test_is_saved_once_it_was_used(tmp_path):
    step = make()
    (x,) = batches(1, 5)

    def load():
        torch.manual_seed(0)
        model = Net()
        return relax_disc.TrainingStep.load(
            tmp_path / "step", model, OPTIMIZERS["adamw"](model.parameters())
        )

    step.save(tmp_path / "step")
    with pytest.raises(InputMismatchError, match="before saving"):
        load()(x, update=False)
    step(x, update=False)
    step.save(tmp_path / "step")
    loaded = load()
    loaded(x, update=False)
    step(x)
    loaded(x)
    for mine, theirs in zip(step.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
