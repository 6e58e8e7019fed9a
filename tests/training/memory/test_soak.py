"""Thousands of steps at changing shapes and budgets: nothing grows."""

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch
import tvm_ffi

import relax_disc
from tests.frontend.models import Llama, dims, token_batch

SHAPES = [(b, s) for b in (1, 2, 3, 5, 8) for s in (1, 4, 7, 9, 16, 23, 31, 48)]
BUDGETS = (1.0, 0.6, None, 0.3)


def resident_bytes():
    """Pages of this process that are in memory, without what malloc could give back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def train(step, batches, limits, first, steps):
    """Steps over all pairs of shapes and budgets; the most that was held between calls."""
    most = 0
    for k in range(first, first + steps):
        shape = SHAPES[k * 7 % len(SHAPES)]
        step.memory_budget = limits[shape][k // len(SHAPES) % len(BUDGETS)]
        step(*batches[shape])
        if k % 50 == 0:
            report = step.memory_report()
            assert report.peak_bytes == report.planned_peak_bytes
            if step.memory_budget is not None:
                assert report.peak_bytes <= step.memory_budget
            most = max(most, report.held_bytes)
    return most


@pytest.mark.parametrize("steps", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_grows(steps):
    torch.manual_seed(0)
    model = Llama(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    b, s = dims()
    step = relax_disc.compile(
        model, optimizer, token_batch(3, 12), dynamic_shapes=({0: b, 1: s}, {0: b, 1: s})
    )
    batches = {shape: token_batch(*shape) for shape in SHAPES}
    plans = {shape: step.plan(b=shape[0], s=shape[1]) for shape in SHAPES}
    largest = max(plan.arena_bytes for plan in plans.values())
    limits = {}
    for shape, plan in plans.items():
        limits[shape] = []
        for share in BUDGETS:
            if share is None:
                limits[shape].append(None)
                continue
            step.memory_budget = plan.peak_bytes - int((1 - share) * plan.arena_bytes)
            limits[shape].append(
                max(step.memory_budget, step.plan(b=shape[0], s=shape[1]).least_bytes)
            )
    step.session.set_plan_limit(50)  # fewer than there are pairs, so that plans come and go
    allocated = tvm_ffi.get_global_func("relax_disc.allocated_bytes")
    warm = steps // 4
    assert train(step, batches, limits, 0, warm) <= largest
    step.session.release()  # or the arenas of the last shapes would be compared
    gc.collect()
    before, objects = resident_bytes(), len(gc.get_objects())
    held = allocated()
    assert train(step, batches, limits, warm, steps - warm) <= largest
    step.session.release()
    gc.collect()
    # What malloc keeps to itself moves by a megabyte or two; a leak of a page a step would be 30.
    assert resident_bytes() - before <= 4 << 20
    assert len(gc.get_objects()) - objects <= 200
    counters = step.session.counters()
    assert counters.plans <= 50 < counters.evicted_plans
    assert counters.calls == steps and counters.failures == 0
    assert allocated() == held
