"""Memory over many shapes: dynamic against static, tensors against arena, an epoch against a step.

All by plan, which equals what runs to the byte.  `against_static` compiles the same step again for
each shape alone.  `over_epoch` takes the lengths of a whole epoch of CodeAlpaca in random order and
follows the arena by the run time's rules: it grows to what a call needs, stays for a while, and is
cut to what a call needs where keeping more would break the budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.export import Dim

from benchmarks.training.batches import LONGEST, epoch_lengths, make_batch
from benchmarks.training.worker import peer_llama
from relax_disc.frontend import capture_step
from relax_disc.memory_analysis import analyze_memory
from relax_disc.training.memory_plan import MemoryPlan
from relax_disc.training_step import TrainingStep

STATIC_SHAPES = ((4, 82), (4, 141), (8, 183), (4, 328), (14, 279), (8, 512))
EPOCH_BATCH = 14
# As in src/runtime/arena.cc.
IDLE_CALLS = 64


def against_static(size: str, shapes: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
    """Compare the unlimited peak of one dynamic compilation with static ones of each shape."""
    dims = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=LONGEST)}
    dynamic = _module(size, (2, 24), dims)
    rows = []
    for batch, length in shapes:
        ours = analyze_memory(dynamic, {"batch": batch, "length": length})
        static = analyze_memory(_module(size, (batch, length), {}), {})
        rows.append(
            {
                "size": size,
                "batch": batch,
                "length": length,
                "dynamic_bytes": ours.peak_bytes,
                "static_bytes": static.peak_bytes,
                "ratio": ours.peak_bytes / static.peak_bytes,
            }
        )
    return rows


def _module(size: str, shape: tuple[int, int], dims: dict[int, Any]) -> Any:
    torch.manual_seed(0)
    model = peer_llama(size)
    batch, length = shape
    return capture_step(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        make_batch([length] * batch, seed=0),
        dynamic_shapes={"ids": dims, "labels": dims},
    ).module


def over_epoch(step: TrainingStep, batch: int, budgets: Iterable[float]) -> list[dict[str, Any]]:
    """Follow the footprint of an epoch without a budget, and at parts of its largest activations.

    Parameters
    ----------
    step : TrainingStep
        With dims ``batch`` and ``length``.
    batch : int
        Records in a batch; the last one is shorter.
    budgets : iterable of float
        Parts of the largest unlimited activation peak of the epoch.
    """
    shapes = [(len(lengths), max(lengths)) for lengths in epoch_lengths(batch)]
    step.memory_budget = None
    free = {shape: step.plan(batch=shape[0], length=shape[1]) for shape in dict.fromkeys(shapes)}
    largest = max(free.values(), key=lambda plan: plan.activation_peak_bytes)
    rows = [_epoch_row(shapes, free, 1.0, None)]
    for part in budgets:
        budget = largest.state_bytes + int(largest.activation_peak_bytes * part)
        step.memory_budget = budget
        plans = {shape: step.plan(batch=shape[0], length=shape[1]) for shape in free}
        rows.append(_epoch_row(shapes, plans, part, budget))
    step.memory_budget = None
    return rows


def footprint(plans: Iterable[MemoryPlan], budget: int | None) -> int:
    """Most bytes held at once by calls of these plans, one after another, by the run time's rules.

    Parameters
    ----------
    plans : iterable of MemoryPlan
        In the order of the calls.
    budget : int or None
        Of all calls.
    """
    arena = most = idle_calls = idle_need = 0
    for plan in plans:
        outside = plan.resident_bytes + plan.escaping_bytes
        wanted = max(plan.arena_bytes, arena)
        is_small = arena > 0 and plan.arena_bytes <= arena // 2
        idle_calls = idle_calls + 1 if is_small else 0
        idle_need = max(idle_need, plan.arena_bytes) if is_small else 0
        if idle_calls >= IDLE_CALLS:
            wanted, idle_calls = idle_need, 0
        if budget is not None and outside + wanted > budget:
            wanted = plan.arena_bytes
        arena = wanted
        most = max(most, outside + arena)
    return most


def _epoch_row(
    shapes: list[tuple[int, int]],
    plans: dict[tuple[int, int], MemoryPlan],
    part: float,
    budget: int | None,
) -> dict[str, Any]:
    most = footprint((plans[shape] for shape in shapes), budget)
    highest = max(plan.peak_bytes for plan in plans.values())
    return {
        "part": part,
        "steps": len(shapes),
        "shapes": len(plans),
        "fit": sum(plan.fits for plan in plans.values()),
        "largest_step_bytes": highest,
        "footprint_bytes": most,
        "ratio": most / highest,
        "arena_to_live": max(
            plan.arena_bytes / plan.live_peak_bytes for plan in plans.values() if plan.fits
        ),
        "time_ratio": max(plan.time_ratio for plan in plans.values() if plan.fits),
    }
