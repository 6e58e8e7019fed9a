"""Fine-tune a Llama-style model on Python's own source code
===========================================================

From docstring to source: every documented function of the standard library is an instruction and
its answer.  Batches are padded to their own longest example, so nearly every step has another
shape; the training step was compiled once.

    python tutorials/finetune_llama.py                      # two minutes on two cores
    python tutorials/finetune_llama.py --engine eager       # the same in plain PyTorch
    python tutorials/finetune_llama.py --data alpaca.json --save run.safetensors --steps 2000
    python tutorials/finetune_llama.py --data alpaca.json --resume run.safetensors --steps 4000
"""  # noqa: D205, D400

from __future__ import annotations

import json
import resource
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import _checkpoint
import torch
import typer
from _corpus import Batches
from _engines import Engine, Step, make_step, planned_peak_bytes
from _setup import LIBRARY, Settings, make_batches, make_model, smoke_settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from relax_disc.bytes_text import format_bytes
from relax_disc.errors import InputMismatchError, RelaxDiscError
from relax_disc.vm_builtins import native

_WARM_UP_STEPS = 20
_SMOOTHED = 10


@dataclass
class Tally:
    """What the run has seen, for the bar and for the table at the end."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_SMOOTHED))
    first_loss: float = float("nan")
    tokens: int = 0
    seconds: float = 0.0
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    peak_bytes: int = 0

    @property
    def loss(self) -> float:
        """Mean of the last few losses."""
        return sum(self.losses) / max(1, len(self.losses))

    @property
    def tokens_per_second(self) -> float:
        """Real tokens, padding not counted, per second inside steps."""
        return self.tokens / self.seconds if self.seconds else 0.0


def process_peak_bytes() -> int:
    """Most memory that this process has held, from the operating system."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def train(
    step: Step,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    settings: Settings,
    *,
    first: int,
    last: int,
    progress: Progress,
    after_step: Any,
) -> Tally:
    """Run the steps `first` to `last`, exclusive; `after_step(done, shape, loss)` after each."""
    tally = Tally()
    bar = progress.add_task("training", total=last, completed=first, loss="", speed="")
    for number in range(first, last):
        batch = batches[number]
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (number + 1) / _WARM_UP_STEPS)
        start = time.perf_counter()
        loss = step(batch.ids, batch.labels).item()
        tally.seconds += time.perf_counter() - start
        if not tally.losses:
            tally.first_loss = loss
        tally.losses.append(loss)
        tally.tokens += batch.tokens
        tally.shapes.add(tuple(batch.ids.shape))
        tally.peak_bytes = max(tally.peak_bytes, planned_peak_bytes(step, batch) or 0)
        progress.update(
            bar,
            completed=number + 1,
            loss=f"loss {tally.loss:.3f}",
            speed=f"{tally.tokens_per_second:,.0f} tokens/s",
        )
        after_step(number + 1, tuple(batch.ids.shape), loss)
    return tally


def main(
    data: Annotated[
        Path | None, typer.Option(help="Records in Alpaca's JSON format; else Python's library.")
    ] = None,
    hidden: Annotated[
        int, typer.Option(help="Width of the model, a multiple of 64.")
    ] = Settings.hidden,
    layers: Annotated[int, typer.Option(help="Number of layers.")] = Settings.layers,
    vocabulary: Annotated[int, typer.Option(help="Most tokens of the BPE.")] = Settings.vocabulary,
    longest: Annotated[int, typer.Option(help="Longer records are left out.")] = Settings.longest,
    steps: Annotated[int, typer.Option(help="Steps in all, those resumed from included.")] = 150,
    batch: Annotated[int, typer.Option(help="Records in a batch.")] = Settings.batch,
    learning_rate: Annotated[
        float, typer.Option(help="After the warm-up.")
    ] = Settings.learning_rate,
    seed: Annotated[
        int, typer.Option(help="Of the initial weights and the data order.")
    ] = Settings.seed,
    budget: Annotated[
        str | None, typer.Option(help='Memory budget of a step, such as "600MiB".')
    ] = None,
    save: Annotated[Path | None, typer.Option(help="File to save the run to.")] = None,
    save_every: Annotated[int, typer.Option(help="Steps between two saves.")] = 25,
    resume: Annotated[Path | None, typer.Option(help="Saved run to continue.")] = None,
    history: Annotated[
        Path | None, typer.Option(help="Append a JSON line per step: shape and loss.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="What runs the steps.")] = "relax_disc",
    smoke: Annotated[bool, typer.Option(help="Tiny sizes, to see that everything works.")] = False,
) -> None:
    """Fine-tune a Llama-style model at every length, from one compilation."""
    settings = Settings(
        data=str(data) if data else LIBRARY,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        longest=longest,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
    )
    if engine == "eager" and budget is not None:
        raise typer.BadParameter("PyTorch cannot keep inside a budget", param_hint="--budget")
    if smoke:
        settings, steps = smoke_settings(settings), min(steps, 12)
    console = Console()
    try:
        batches = make_batches(settings)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--data") from error
    model, optimizer = make_model(settings)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{batches.records:,} records of {settings.data}, {parameters / 1e6:.1f} M parameters, "
        f"batches of {settings.batch} padded to their longest"
    )

    if engine == "relax_disc":
        with console.status("building the C++ runtime, once per machine"):
            native.load()
    start = time.perf_counter()
    try:
        step = make_step(engine, model, optimizer, batches[0], memory_budget=budget)
    except InputMismatchError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error
    compile_seconds = time.perf_counter() - start
    compilations = 0 if engine == "eager" else 1
    if compilations:
        console.print(f"compiled the training step in {compile_seconds:.1f} s")

    done = 0
    if resume is not None:
        try:
            done, rng_state = _checkpoint.load(resume, model, optimizer, settings=asdict(settings))
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error), param_hint="--resume") from error
        if done >= steps:
            raise typer.BadParameter(
                f"{resume} has done {done} steps already; ask for more than that",
                param_hint="--steps",
            )
        if rng_state is not None:
            step.rng_state = rng_state  # type: ignore[attr-defined]
        console.print(f"continuing after step {done} of {resume}")

    def after_step(finished: int, shape: tuple[int, ...], loss: float) -> None:
        if history is not None:
            with history.open("a") as file:
                file.write(json.dumps({"step": finished, "shape": shape, "loss": loss}) + "\n")
        if save is not None and (finished % save_every == 0 or finished == steps):
            _checkpoint.save(
                save,
                model,
                optimizer,
                step=finished,
                settings=asdict(settings),
                rng_state=getattr(step, "rng_state", None),
            )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=console) as progress:
        tally = train(
            step,
            optimizer,
            batches,
            settings,
            first=done,
            last=steps,
            progress=progress,
            after_step=after_step,
        )

    table = Table(title=f"{steps - done} steps with {engine}", show_header=False)
    table.add_row("loss, first step", f"{tally.first_loss:.3f}")
    table.add_row(f"loss, mean of the last {len(tally.losses)}", f"{tally.loss:.3f}")
    table.add_row("real tokens per second", f"{tally.tokens_per_second:,.0f}")
    table.add_row("distinct shapes", str(len(tally.shapes)))
    table.add_row("compilations", str(compilations))
    if tally.peak_bytes:
        table.add_row("peak memory of a step, planned", format_bytes(tally.peak_bytes))
    table.add_row("peak memory of the process", format_bytes(process_peak_bytes()))
    console.print(table)


if __name__ == "__main__":
    try:
        typer.run(main)
    except RelaxDiscError as error:  # says what to do next; where it was raised helps nobody
        sys.exit(f"{type(error).__name__}: {error}")
