"""What a memory budget costs at full size, by plan.

Four layers of Llama-2-7B (float32, AdamW) are planned for a GPU of 500 TFLOP/s, 4 TB/s and 3 us a
kernel: nothing is touched but address space, and no kernel runs.  Budgets are fractions of the
unlimited activation peak of each shape.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.export import Dim

import relax_disc
from benchmarks.training_batches import VOCABULARY, make_batch
from relax_disc.training_step import TrainingStep
from tutorials._llama import Llama, LlamaSizes

FRACTIONS = (0.75, 0.5, 1 / 3, 0.25)
# A data-centre GPU: float32 matrix products at tensor-core rate, memory, one kernel's launch.
FLOPS_PER_NS, BYTES_PER_NS, KERNEL_NS = 500_000.0, 4_000.0, 3_000.0


def budget_of(step: TrainingStep, fraction: float, shape: dict[str, Any]) -> int:
    """Bytes that leave a fraction of the unlimited activation peak of a shape."""
    step.memory_budget = None
    plan = step.plan(**shape)
    return plan.peak_bytes - plan.activation_peak_bytes + int(plan.activation_peak_bytes * fraction)


def full_size_model() -> Llama:
    """Make the model; no page of it is touched before a kernel writes it."""
    sizes = LlamaSizes(
        vocabulary=VOCABULARY, layers=4, hidden=4096, heads=32, feed_forward=11008, longest=2048
    )
    with torch.device("meta"):
        model = Llama(sizes)
    return model.to_empty(device="cpu")


def full_size_step() -> TrainingStep:
    """Compile the model's step for batches up to 64 of up to 2,048 tokens."""
    step = compile_llama(full_size_model(), batch=64, longest=2048)
    step.session.set_cost_model(FLOPS_PER_NS, BYTES_PER_NS, KERNEL_NS)
    return step


def plan_full_size(
    step: TrainingStep, batches: list[int], lengths: list[int]
) -> list[dict[str, Any]]:
    """Plan the step at shapes and budgets; one row each."""
    rows = []
    for batch in batches:
        for length in lengths:
            shape: dict[str, Any] = {"batch": batch, "length": length}
            step.memory_budget = None
            free = step.plan(**shape)
            rows.append(_row(shape, 1.0, free, free.activation_peak_bytes, 0.0))
            for fraction in FRACTIONS:
                step.memory_budget = budget_of(step, fraction, shape)
                start = time.perf_counter()
                plan = step.plan(**shape)
                seconds = time.perf_counter() - start
                rows.append(_row(shape, fraction, plan, free.activation_peak_bytes, seconds))
    with step.session.dry_run():
        step.memory_budget = None
        ids = torch.zeros(batches[-1], lengths[-1], dtype=torch.long)
        step(ids, ids)
    report = step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes
    return rows


def _row(
    shape: dict[str, int], fraction: float, plan: Any, free_bytes: int, seconds: float
) -> dict[str, Any]:
    return {
        **shape,
        "fraction": fraction,
        "fits": plan.fits,
        "activation_peak_bytes": plan.activation_peak_bytes,
        "of_unlimited": plan.activation_peak_bytes / free_bytes,
        "time_ratio": plan.time_ratio if plan.fits else None,
        "recomputations": len(plan.evicted),
        "planning_seconds": seconds,
    }


def compile_llama(model: torch.nn.Module, *, batch: int, longest: int) -> TrainingStep:
    """Compile the step of a model for all batches and lengths up to those."""
    shape = {0: Dim("batch", min=1, max=batch), 1: Dim("length", min=1, max=longest)}
    return relax_disc.compile(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        make_batch([24, 16], seed=0),
        dynamic_shapes={"ids": shape, "labels": shape},
    )
