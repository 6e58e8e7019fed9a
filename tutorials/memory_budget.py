"""The same fine-tuning, with and without a memory budget
======================================================

One compiled step trains three times from the same weights on the same batches: without a budget,
within one that leaves about half of the memory for activations, and within it with a folder that
tensors may be offloaded to.  The losses are the same to the last bit; what changes is memory and
time, and both were known before the step ran.

    python tutorials/memory_budget.py
"""  # noqa: D205, D400

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated, Any

import torch
import typer
from _corpus import Batch
from _engines import make_step
from _setup import Settings, make_batches, make_model, smoke_settings
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from relax_disc import TrainingStep
from relax_disc.bytes_text import format_bytes
from relax_disc.training.memory_plan import MemoryPlan

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.malloc_counter import MallocCounter, preload_environment

_MARK = "RELAX_DISC_TUTORIAL_COUNTS"


@dataclass(frozen=True, slots=True)
class Phase:
    """What a pass over the batches gave; bytes are above what was there before any step."""

    losses: list[float]
    seconds: float
    reloaded_bytes: int
    planned_bytes: int
    measured_bytes: int


def plans_of(step: TrainingStep, batches: Sequence[Batch]) -> list[MemoryPlan]:
    """Plan for what each batch holds: padding is left out, so that lengths alone say too much."""
    shapes: list[dict[str, Any]] = [step.shape_of(batch.ids, batch.labels) for batch in batches]
    return [step.plan(**shape) for shape in shapes]


def run_phase(
    step: TrainingStep, batches: Sequence[Batch], counter: MallocCounter, base: int
) -> Phase:
    """Take a step with every batch; meanwhile measure memory above `base` from outside."""
    plans = plans_of(step, batches)
    counter.reset_peak()
    start = time.perf_counter()
    losses = [step(batch.ids, batch.labels).item() for batch in batches]
    return Phase(
        losses,
        time.perf_counter() - start,
        sum(plan.reloaded_bytes for plan in plans),
        max(plan.peak_bytes - plan.resident_bytes for plan in plans),
        counter.peak_bytes() - base,
    )


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that training changes: parameters, buffers, optimizer state."""
    states = optimizer.state_dict()["state"].values()
    return [*model.state_dict().values(), *(v for state in states for v in state.values())]


def main(
    steps: Annotated[int, typer.Option(help="Steps of each of the two passes.")] = 20,
    share: Annotated[float, typer.Option(help="Of the activations that the budget leaves.")] = 0.5,
    folder: Annotated[str, typer.Option(help="To offload to; on a fast disk.")] = gettempdir(),
    smoke: Annotated[bool, typer.Option(help="Tiny sizes, to see that everything works.")] = False,
) -> None:
    """Train three times from one compilation and compare losses, memory and time."""
    console = Console()
    settings = smoke_settings(Settings()) if smoke else Settings()
    data = make_batches(settings)
    batches = [data[number] for number in range(min(steps, 4) if smoke else steps)]
    model, optimizer = make_model(settings)
    step = make_step("relax_disc", model, optimizer, batches[0])
    assert isinstance(step, TrainingStep)

    # The budget counts everything: what must be there anyway, and the share of the activations,
    # or the least that a plan was found for.
    plans = plans_of(step, batches)
    plan = max(plans, key=lambda each: each.peak_bytes)
    budget = plan.peak_bytes - int((1 - share) * plan.activation_peak_bytes)
    budget = step.memory_budget = max(budget, *(each.least_bytes for each in plans))
    step(batches[0].ids, batches[0].labels)  # makes the optimizer's state, as PyTorch does
    step.session.release()
    initial = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    counter = MallocCounter()
    base = counter.live_bytes()

    table = Table(title=f"{len(batches)} steps, from one compilation")
    table.add_column("")
    phases, peaks, fitting = [], [], []
    for title, limit, place in (
        (f"budget of {format_bytes(budget)}", budget, None),
        ("budget, offloading", budget, folder),
        ("no budget", None, None),
    ):
        for tensor, value in zip(tensors_of(model, optimizer), initial, strict=True):
            tensor.copy_(value)
        step.memory_budget, step.offload_to = limit, place
        peaks.append(max(plans_of(step, batches), key=lambda each: each.peak_bytes))
        phases.append(run_phase(step, batches, counter, base))
        bound = plan.peak_bytes if limit is None else limit
        fitting.append(step.largest("batch", length=settings.longest, memory_budget=bound))
        table.add_column(title, justify="right")

    table.add_row("last loss", *(repr(phase.losses[-1]) for phase in phases))
    for title, amounts in (
        ("peak, planned", [peak.peak_bytes for peak in peaks]),
        ("of that activations", [peak.activation_peak_bytes for peak in peaks]),
        ("held by the steps, planned", [phase.planned_bytes for phase in phases]),
        ("held by the steps, measured", [phase.measured_bytes for phase in phases]),
        ("written to the folder and read back", [phase.reloaded_bytes for phase in phases]),
    ):
        table.add_row(title, *map(format_bytes, amounts))
    table.add_row("seconds", *(f"{phase.seconds:.1f}" for phase in phases))
    table.add_row(f"largest batch in that peak, length {settings.longest}", *map(str, fitting))
    console.print(table)
    same = all(phase.losses == phases[0].losses for phase in phases)
    console.print(f"losses identical to the last bit: {same}")
    raise typer.Exit(0 if same else 1)


if __name__ == "__main__":
    if _MARK not in os.environ:
        # Start again with a counter of malloc and mmap preloaded, to measure from outside.
        environment = {**os.environ, **preload_environment(), _MARK: "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    typer.run(main)
