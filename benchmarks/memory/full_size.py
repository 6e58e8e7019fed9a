"""What a memory budget costs at full size, by plan.

Four layers of Llama-2-7B (float32, AdamW) are planned for a GPU of 500 TFLOP/s, 4 TB/s and 3 us a
kernel: nothing is touched but address space, and no kernel runs.  Budgets are fractions of the
unlimited activation peak of each shape, times are over that of the same reference.  There are two
steps, both fused and scheduled: "once" computes no value twice without a budget, "default" computes
some again in the kernels that read them (`InlineProducers`, joined kernels).  Each is held against
its own unlimited run, and the default also against the other's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import Dim

import relax_disc
from benchmarks.dry_time import Machine
from benchmarks.training.batches import VOCABULARY, make_batch
from relax_disc.compiler import build_or_reuse
from relax_disc.frontend import capture_step
from relax_disc.pipeline import PipelineOptions
from relax_disc.training_step import TrainingStep
from tutorials._llama import Llama, LlamaSizes

FRACTIONS = (0.75, 0.5, 1 / 3, 0.25)
# A data-centre GPU: float32 matrix products at tensor-core rate, memory, one kernel's launch.
MACHINE = Machine(flops_per_ns=500_000.0, bytes_per_ns=4_000.0, launch_ns=3_000.0)
SIZES = LlamaSizes(
    vocabulary=VOCABULARY, layers=4, hidden=4096, heads=32, feed_forward=11008, longest=2048
)


def budget_of(step: TrainingStep, fraction: float, shape: dict[str, Any]) -> int:
    """Bytes that leave a fraction of the unlimited activation peak of a shape."""
    step.memory_budget = None
    plan = step.plan(**shape)
    return plan.peak_bytes - plan.activation_peak_bytes + int(plan.activation_peak_bytes * fraction)


def full_size_model() -> Llama:
    """Make the model; no page of it is touched before a kernel writes it."""
    with torch.device("meta"):
        model = Llama(SIZES)
    return model.to_empty(device="cpu")


def full_size_step(options: PipelineOptions | None = None) -> TrainingStep:
    """Compile the model's step for batches up to 64 of up to 2,048 tokens."""
    step = compile_llama(full_size_model(), batch=64, longest=2048, options=options)
    step.session.set_machine(MACHINE.flops_per_ns, MACHINE.bytes_per_ns, MACHINE.launch_ns)
    return step


def plan_full_size(
    step: TrainingStep, batches: list[int], lengths: list[int]
) -> list[dict[str, Any]]:
    """Plan the step at shapes and budgets; one row each."""
    once = full_size_step(PipelineOptions(inline_producers=False, join_kernels=False))
    steps = {"default": step, "once": once}
    rows = []
    for batch in batches:
        for length in lengths:
            shape: dict[str, Any] = {"batch": batch, "length": length}
            for name, of in (("default", "once"), ("default", "default"), ("once", "once")):
                planned, reference = steps[name], steps[of]
                reference.memory_budget = None
                bytes_, nanoseconds = _unlimited(reference, shape)
                planned.memory_budget = None
                row = {"step": name, "reference": of, **shape}
                rows.append(row | _plan(planned, shape, 1.0, bytes_, nanoseconds))
                for fraction in FRACTIONS:
                    planned.memory_budget = budget_of(reference, fraction, shape)
                    rows.append(row | _plan(planned, shape, fraction, bytes_, nanoseconds))
    with step.session.dry_run():
        step.memory_budget = None
        ids = torch.zeros(batches[-1], lengths[-1], dtype=torch.long)
        step(ids, ids)
    report = step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes
    return rows


def _unlimited(step: TrainingStep, shape: dict[str, Any]) -> tuple[int, int]:
    """Return the activation peak in bytes and the modelled time in ns without a budget."""
    return step.plan(**shape).activation_peak_bytes, modelled_ns(step, shape)


def modelled_ns(step: TrainingStep, shape: Mapping[str, int]) -> int:
    """Return the modelled time of a step at a shape, within its budget; ``shape``: every dim."""
    dims = [shape[name] for name in step.session.metadata.dims]
    return step.session.plan(dims, step.memory_budget).time_ns


def _plan(
    step: TrainingStep,
    shape: dict[str, Any],
    fraction: float,
    free_bytes: int,
    free_ns: int,
) -> dict[str, Any]:
    start = time.perf_counter()
    plan = step.plan(**shape)
    seconds = time.perf_counter() - start
    return {
        "fraction": fraction,
        "fits": plan.fits,
        "activation_peak_bytes": plan.activation_peak_bytes,
        "of_unlimited": plan.activation_peak_bytes / free_bytes,
        "time_ratio": modelled_ns(step, shape) / free_ns if plan.fits else None,
        "recomputations": len(plan.evicted),
        "planning_seconds": seconds,
    }


def compile_llama(
    model: torch.nn.Module, *, batch: int, longest: int, options: PipelineOptions | None = None
) -> TrainingStep:
    """Compile the step of a model for all batches and lengths up to those."""
    shape = {0: Dim("batch", min=1, max=batch), 1: Dim("length", min=1, max=longest)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    example, shapes = make_batch([24, 16], seed=0), {"ids": shape, "labels": shape}
    if options is None:
        return relax_disc.compile(model, optimizer, example, dynamic_shapes=shapes)
    captured = capture_step(model, optimizer, example, dynamic_shapes=shapes)
    built = build_or_reuse(captured.module, "llvm", options)
    return TrainingStep(captured, built.executable, model, optimizer, built.library)
