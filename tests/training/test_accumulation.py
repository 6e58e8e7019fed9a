"""Gradient accumulation: like eager's, and like one batch of the whole size."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc import compiler
from relax_disc.errors import InputMismatchError, RelaxDiscWarning
from relax_disc.vm_builtins import native
from tests.tiers import every
from tests.training.accumulating import OPTIMIZERS, Net, batches, close, make, quarter


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


@pytest.mark.parametrize("dtype", every(2, [torch.float32, torch.bfloat16]))
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


def test_gradients_of_others_are_left_out_after_a_sum_was_cleared():
    step, other = make(), make()
    parts = batches(2, 5)
    step(parts[0], update=False)
    step.optimizer.zero_grad()
    for each in (step, other):  # p.grad is not of a sum in either
        each(parts[0])
        each.model(parts[0]).backward()
        with pytest.warns(RelaxDiscWarning, match="leaves them out"):
            each(parts[1])
    close(step.model, other.model)


def _entropy(model, x):
    return torch.tanh(model.first(x)).square().mean() + model.second.weight.square().sum()


@pytest.mark.parametrize("norm", every(2, [0.05, None]))
def test_another_steps_sums_are_part_of_the_update(norm):
    first = make("adamw", max_grad_norm=norm)
    model, twin = first.model, copy.deepcopy(first.model)
    theirs = OPTIMIZERS["adamw"](twin.parameters())
    example, shapes = batches(1, 4), ({0: Dim("rows", min=1, max=64)},)
    options = {"dynamic_shapes": shapes, "max_grad_norm": norm}

    def every(model, x):  # all parameters, whatever the bias of the last layer does
        return _entropy(model, x) + model.second.bias.square().sum()

    second = relax_disc.compile(model, first.optimizer, example, loss_fn=every, **options)
    for x in batches(3, 5):
        first(x, update=False)
        second(x, keep_gradients=True)
        for loss in (quarter, every):
            loss(twin, x).backward()
        _update(theirs, twin, norm)
        first(x)  # the gradients kept are used, and no sum
        quarter(twin, x).backward()
        _update(theirs, twin, norm)
        close(model, twin)


def _update(optimizer, model, norm):
    if norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()
    optimizer.zero_grad()


def test_another_steps_sums_that_an_update_would_leave_out_are_refused():
    first = make("momentum")
    model = first.model
    shapes = ({0: Dim("rows", min=1, max=64)},)
    (x,) = batches(1, 5)
    second = relax_disc.compile(
        model, first.optimizer, (x,), dynamic_shapes=shapes, loss_fn=_entropy
    )
    first(x, update=False)
    before = copy.deepcopy(model)
    with pytest.raises(InputMismatchError, match=r"second\.bias holds gradients that another step"):
        second(x)
    close(model, before)
    second(x, update=False)  # what the message says
    first.optimizer.step()
    first.optimizer.zero_grad()
    (quarter(before, x) + _entropy(before, x)).backward()
    OPTIMIZERS["momentum"](before.parameters()).step()
    close(model, before)


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
