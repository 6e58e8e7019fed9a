"""The same fine-tuning, with and without a memory budget
======================================================

One compiled step trains twice from the same weights on the same batches: within a budget that
leaves about half of the memory for activations, then without one.  The losses are the same to the
last bit; what changes is memory and time, and both were known before the step ran.

    python tutorials/memory_budget.py
"""  # noqa: D205, D400

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

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

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.malloc_counter import MallocCounter, preload_environment

_MARK = "RELAX_DISC_TUTORIAL_COUNTS"


@dataclass(frozen=True, slots=True)
class Phase:
    """What a pass over the batches gave; bytes are above what was there before any step."""

    losses: list[float]
    seconds: float
    planned_bytes: int
    measured_bytes: int


def run_phase(
    step: TrainingStep, batches: Sequence[Batch], counter: MallocCounter, base: int
) -> Phase:
    """Take a step with every batch; meanwhile measure memory above `base` from outside."""
    plans = [step.plan(batch=b.ids.shape[0], length=b.ids.shape[1]) for b in batches]
    counter.reset_peak()
    start = time.perf_counter()
    losses = [step(batch.ids, batch.labels).item() for batch in batches]
    return Phase(
        losses,
        time.perf_counter() - start,
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
    smoke: Annotated[bool, typer.Option(help="Tiny sizes, to see that everything works.")] = False,
) -> None:
    """Train twice from one compilation and compare losses, memory and time."""
    console = Console()
    settings = smoke_settings(Settings()) if smoke else Settings()
    data = make_batches(settings)
    batches = [data[number] for number in range(min(steps, 4) if smoke else steps)]
    model, optimizer = make_model(settings)
    step = make_step("relax_disc", model, optimizer, batches[0])
    assert isinstance(step, TrainingStep)

    # The budget counts everything: what must be there anyway, and the share of the activations,
    # or the least that a plan was found for.
    longest = max(batches, key=lambda batch: batch.ids.numel()).ids.shape
    plan = step.plan(batch=longest[0], length=longest[1])
    budget = plan.peak_bytes - int((1 - share) * plan.activation_peak_bytes)
    step.memory_budget = budget
    held = step.plan(batch=longest[0], length=longest[1])
    if not held.fits:
        budget = step.memory_budget = held.least_bytes
        held = step.plan(batch=longest[0], length=longest[1])
    step(batches[0].ids, batches[0].labels)  # makes the optimizer's state, as PyTorch does
    step.session.release()
    initial = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    counter = MallocCounter()
    base = counter.live_bytes()

    within = run_phase(step, batches, counter, base)
    for tensor, value in zip(tensors_of(model, optimizer), initial, strict=True):
        tensor.copy_(value)
    step.memory_budget = None
    without = run_phase(step, batches, counter, base)

    table = Table(title=f"{len(batches)} steps, from one compilation")
    table.add_column("")
    table.add_column("no budget", justify="right")
    table.add_column(f"budget of {format_bytes(budget)}", justify="right")
    table.add_row("last loss", repr(without.losses[-1]), repr(within.losses[-1]))
    for title, amounts in (
        ("peak, planned", (plan.peak_bytes, held.peak_bytes)),
        ("of that activations", (plan.activation_peak_bytes, held.activation_peak_bytes)),
        ("held by the steps, planned", (without.planned_bytes, within.planned_bytes)),
        ("held by the steps, measured", (without.measured_bytes, within.measured_bytes)),
    ):
        table.add_row(title, *map(format_bytes, amounts))
    table.add_row("seconds", f"{without.seconds:.1f}", f"{within.seconds:.1f}")
    fitting = [
        step.largest("batch", length=settings.longest, memory_budget=limit)
        for limit in (plan.peak_bytes, budget)
    ]
    table.add_row(f"largest batch in that peak, length {settings.longest}", *map(str, fitting))
    console.print(table)
    same = within.losses == without.losses
    console.print(f"losses identical to the last bit: {same}")
    raise typer.Exit(0 if same else 1)


if __name__ == "__main__":
    if _MARK not in os.environ:
        # Start again with a counter of malloc and mmap preloaded, to measure from outside.
        environment = {**os.environ, **preload_environment(), _MARK: "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    typer.run(main)
