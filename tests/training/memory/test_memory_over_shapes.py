"""One dynamic compilation over many shapes costs no memory: per shape, per epoch, per arena."""

import random

import pytest
import torch

import relax_disc
from benchmarks.memory.shapes import footprint
from relax_disc.frontend import capture_step
from relax_disc.memory_analysis import analyze_memory
from relax_disc.pipeline import PipelineOptions
from tests.frontend.models import Llama, dims, token_batch
from tests.tiers import every

SHAPES = [(8, 48), (2, 5), (3, 17)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    model = Llama(layers=3)
    b, s = dims()
    shapes = ({0: b, 1: s}, {0: b, 1: s})
    # A static program has no padding to leave out.
    options = PipelineOptions(remove_padding=False)
    return relax_disc.compile(
        model, adamw(model), token_batch(3, 12), dynamic_shapes=shapes, options=options
    )


def plans_at(step, part):
    """Plans of all shapes at a part of each one's unlimited activations."""
    plans = []
    for b, s in SHAPES:
        step.memory_budget = None
        free = step.plan(b=b, s=s)
        step.memory_budget = free.state_bytes + int(free.activation_peak_bytes * part)
        plan = step.plan(b=b, s=s)
        if not plan.fits:
            step.memory_budget = plan.least_bytes
            plan = step.plan(b=b, s=s)
        plans.append(plan)
    step.memory_budget = None
    return plans


@pytest.mark.parametrize("shape", every(3, SHAPES))
def test_dynamic_needs_what_static_needs(step, shape):
    b, s = shape
    torch.manual_seed(0)
    model = Llama(layers=3)
    static = capture_step(model, adamw(model), token_batch(b, s), dynamic_shapes=({}, {}))
    alone = analyze_memory(static.module, {}).peak_bytes
    assert step.plan(b=b, s=s).peak_bytes <= 1.01 * alone


@pytest.mark.parametrize("part", [1.0, 0.6])
def test_plans_do_not_depend_on_what_was_planned_before(step, part):
    first = plans_at(step, part)
    step.session.release()
    for b in range(1, 9):
        step.plan(b=b, s=5 * b)
    assert plans_at(step, part) == first


@pytest.mark.parametrize("part", [1.0, 0.75, 0.5, 1 / 3])
def test_the_arena_is_hardly_larger_than_what_lives_in_it(step, part):
    for plan in plans_at(step, part):
        assert plan.arena_bytes <= 1.02 * plan.live_peak_bytes


@pytest.mark.parametrize("limited", [False, True])
def test_an_epoch_needs_what_its_largest_step_needs(step, limited):
    generator = random.Random(0)
    shapes = [(generator.randint(1, 8), generator.randint(2, 48)) for _ in range(25)]
    step.session.release()
    step.memory_budget = None
    if limited:
        largest = step.plan(b=8, s=48)
        step.memory_budget = largest.peak_bytes - largest.arena_bytes // 3
    plans, held = [], []
    for seed, (b, s) in enumerate(shapes):
        plans.append(step.plan(b=b, s=s))
        step(*token_batch(b, s, seed))
        report = step.memory_report()
        held.append(report.resident_bytes + report.escaping_bytes + report.held_bytes)
    budget, step.memory_budget = step.memory_budget, None
    assert max(held) == footprint(plans, budget)
    assert max(held) <= 1.02 * max(plan.peak_bytes for plan in plans)
