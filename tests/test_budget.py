"""A whole training step within budgets: the same bits, peaks as promised."""

import copy

import pytest
import torch
from torch.export import Dim

import relax_disc
from relax_disc.errors import MemoryBudgetError
from tests.frontend.models import VOCABULARY, Llama

SHAPE = {0: Dim("batch", min=1, max=16), 1: Dim("length", min=1, max=64)}


def batch(count, length):
    generator = torch.Generator().manual_seed(count * 100 + length)
    ids = torch.randint(0, VOCABULARY, (count, length), generator=generator)
    return ids, ids.roll(-1, 1)


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = relax_disc.compile(model, optimizer, batch(3, 5), dynamic_shapes=(SHAPE, SHAPE))
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return model, optimizer, step, start


def train(trained, budget_of):
    """Take steps at several shapes from the same start; return losses and parameters."""
    model, optimizer, step, start = trained
    model.load_state_dict(start[0])
    optimizer.load_state_dict(copy.deepcopy(start[1]))
    losses = []
    for count, length in ((4, 32), (1, 1), (8, 17), (4, 32)):
        step.memory_budget = budget_of(step, count, length)
        planned = step.plan(batch=count, length=length)
        losses.append(step(*batch(count, length)))
        report = step.session.report()
        assert report.peak_bytes == report.planned_peak_bytes == planned.peak_bytes
        if step.memory_budget is not None:
            assert report.peak_bytes <= step.memory_budget
    step.memory_budget = None
    return torch.stack(losses), [parameter.detach().clone() for parameter in model.parameters()]


def part_of_arena(fraction):
    def budget(step, count, length):
        step.memory_budget = None
        plan = step.plan(batch=count, length=length)
        budget = plan.peak_bytes - int(plan.arena_bytes * (1 - fraction))
        step.memory_budget = budget
        return max(budget, step.plan(batch=count, length=length).least_bytes)

    return budget


@pytest.mark.parametrize("fraction", [0.9, 0.7, 0.5, 0.0])
def test_every_budget_trains_to_the_same_bits(trained, fraction):
    losses, parameters = train(trained, lambda *_: None)
    tight_losses, tight_parameters = train(trained, part_of_arena(fraction))
    assert torch.equal(losses, tight_losses)
    assert all(map(torch.equal, parameters, tight_parameters))


def test_refused_step_changes_nothing(trained):
    model, _, step, _ = trained
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step.memory_budget = 1000
    with pytest.raises(MemoryBudgetError) as caught:
        step(*batch(4, 32))
    assert all(map(torch.equal, before, model.parameters()))
    step.memory_budget = caught.value.least_bytes
    step(*batch(4, 32))
    step.memory_budget = None
