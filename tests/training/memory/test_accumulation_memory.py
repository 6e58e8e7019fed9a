"""Gradient accumulation inside the step's memory: one arena, one budget, the same results."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import MemoryBudgetError, NonFiniteLossError
from tests.training.accumulating import batches, make


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
    assert adding.resident_bytes - plain.resident_bytes == gradient_bytes(step) + 4
    assert step.plan(rows=7) == plain
    step(x, update=False)
    report = step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes == adding.peak_bytes
    assert report.state_bytes == plain.state_bytes
    updating = step.plan(rows=7)
    assert updating.resident_bytes - plain.resident_bytes == gradient_bytes(step) + 4
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
    room = max(least(step, update, rows=64) for update in (False, True))
    assert step.largest("rows", memory_budget=room) == 64
    assert step.largest("rows", memory_budget=room - 1) < 64
    step.optimizer.zero_grad()
    assert step.largest("rows", memory_budget=room - 1) == 64


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
