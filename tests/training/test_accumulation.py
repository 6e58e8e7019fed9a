"""Gradient accumulation: like eager's, and like one batch of the whole size."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import InputMismatchError, MemoryBudgetError, NonFiniteLossError


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


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("norm", [None, 0.05])
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


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_four_batches_equal_one_of_four_times_the_size(kind):
    parts = batches(4, 5)
    step, whole = make(kind), make(kind, loss_fn=None)
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
