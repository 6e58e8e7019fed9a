"""Time compiling the models of the speed list next to `torch.compile(dynamic=True)`.

    python -m benchmarks.models.compile_time --resume

Processor time of one thread, that of child processes included: from nothing to the end of the
first training step at a model's first shape, less a later step's.  Each way of each model has a
process of its own with empty caches, and compiles a small model first: imports, and what a machine
is asked once, are left out for both.  Models that compile fast come first; results are written
as they come, and docs/models-speed.md shows them.

With ``--stop-after 3`` torch.compile is stopped when it has taken three times as long as we did and
is not done: its time is recorded as "at least".
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn
from torch._dynamo.utils import counters

import relax_disc
from benchmarks.compile_time import Clock
from benchmarks.models.document import read_results, result_path
from benchmarks.models.entry import Entry
from benchmarks.models.speed_document import RECORDED, write_page
from benchmarks.models.wide import WIDE
from benchmarks.record import commit, machine, without_folders, write_result
from relax_disc.vm_builtins import native

NAME = "compile_time_models"
WAYS = ("relax_disc", "torch.compile")


def _step(way: str, model: Any, example: Any, shapes: Callable[[], Any]) -> Callable[[], Any]:
    """Return a training step, compiled when it is called first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if way == "torch.compile":
        compiled: Any = torch.compile(model, dynamic=True)

        def step() -> None:
            output = compiled(**example)
            (output if isinstance(output, torch.Tensor) else output.loss).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step
    made: list[Any] = []

    def first() -> None:
        if not made:
            made.append(relax_disc.compile(model, optimizer, example, dynamic_shapes=shapes()))
        made[0](**example)

    return first


def _small() -> Entry:
    """Make what both ways compile first."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x)).square().mean()

    return Entry(
        name="small",
        source="torch.nn",
        make=Small,
        batch=lambda rows: {"x": torch.ones(rows, 5)},
        ranges={"rows": (1, 8)},
        axes={"x": {0: "rows"}},
        sizes=[(4,)],
    )


def measure(way: str, entry: Entry, stop_seconds: float = math.inf) -> dict[str, Any]:
    """Compile in this process, which ends when the first step has taken `stop_seconds`.

    Returns
    -------
    dict
        ``seconds`` of the processor; of torch.compile also the ``graphs`` that it made of the
        model: none where it left all to eager PyTorch, as it does with recurrent layers.
    """
    torch.set_num_threads(1)
    for each in (_small(), entry):
        torch.manual_seed(0)
        model, example = each.make().train(), each.batch(*each.sizes[0])
        step = _step(way, model, example, each.dynamic_shapes)
        torch.compiler.reset()
        counters.clear()
        start = Clock.now()
        with _ending(start + stop_seconds if each is entry else math.inf):
            step()
        first, later = Clock.now() - start, []
        for _ in range(2):  # torch.compile may compile again in the second step
            start = Clock.now()
            step()
            later.append(Clock.now() - start)
        seconds = first - min(later)
    found: dict[str, Any] = {"seconds": round(seconds, 2)}
    return {**found, "graphs": counters["stats"]["unique_graphs"]} if way != WAYS[0] else found


@contextmanager
def _ending(at_seconds: float) -> Iterator[None]:
    """End the process, with a line about it, when it has computed so long inside the block."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            if Clock.now() >= at_seconds:
                print(json.dumps({"stopped": True}), flush=True)
                os._exit(0)

    watcher = threading.Thread(target=watch, daemon=True)
    if at_seconds < math.inf:
        watcher.start()
    try:
        yield
    finally:
        done.set()


def _told(
    way: str, entry: Entry, limit_seconds: float, stop_seconds: float = math.inf
) -> dict[str, Any]:
    """Measure in a process of its own.

    Returns what `measure` does, ``at_least`` the seconds after which it was stopped, or ``failed``:
    the reason.
    """
    with tempfile.TemporaryDirectory() as cache:
        settings = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "RELAX_DISC_COMPILE_CACHE": "0",
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        before = Clock.now()
        try:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", __spec__.name, "--worker", way, "--only", entry.name),
                    *("--stop-seconds", str(stop_seconds)),
                ],
                env={**os.environ, **settings},
                capture_output=True,
                text=True,
                timeout=limit_seconds,
            )
        except subprocess.TimeoutExpired:
            # On a busy machine the second figure is the one that tells.
            taken = Clock.now() - before
            return {"failed": f"not done in {limit_seconds:.0f} s, {taken:.0f} s of the processor"}
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line and not line[0].isspace()]
        told = [line for line in lines if "Error" in line or "Exception" in line] or lines
        reason = without_folders(told[-1])[:200] if told else f"ended with {done.returncode}"
        return {"failed": reason}
    found = json.loads(done.stdout.splitlines()[-1])
    return {"at_least": round(stop_seconds, 2)} if "stopped" in found else found


def _order(entries: Sequence[Entry]) -> list[Entry]:
    """Sort by what compiling took when the models were timed; unknown ones come last."""
    known = {
        result["model"]: result.get("compile_seconds", {}).get("relax_disc")
        for name in RECORDED
        for result in read_results(name)["results"]
    }
    return sorted(entries, key=lambda entry: known.get(entry.name) or float("inf"))


def main(
    only: Annotated[list[str] | None, typer.Option(help="Name of a model; again for more.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Only what has no results.")] = False,
    limit_seconds: Annotated[float, typer.Option(help="Of one way of one model.")] = 600.0,
    stop_after: Annotated[
        float, typer.Option(min=1.0, help="Stop torch.compile after so many times our seconds.")
    ] = math.inf,
    worker: Annotated[str, typer.Option(hidden=True)] = "",
    stop_seconds: Annotated[float, typer.Option(hidden=True)] = math.inf,
) -> None:
    """Measure models; writes benchmarks/results/compile_time_models.json and the page of docs."""
    entries = [entry for entry in WIDE if not only or entry.name in only]
    unknown = {*(only or ())} - {entry.name for entry in entries}
    if unknown:
        raise typer.BadParameter(f"no model is called {sorted(unknown)}")
    if worker:
        print(json.dumps(measure(worker, entries[0], stop_seconds)))
        return
    native.load()  # built once per machine: no part of a compilation
    console = Console()
    found: dict[str, Any] = read_results(NAME)["results"] if result_path(NAME).exists() else {}
    for entry in _order(entries):
        if resume and entry.name in found:
            continue
        ours = _told(WAYS[0], entry, limit_seconds)
        stop = stop_after * ours.get("seconds", math.inf)
        row: dict[str, Any] = {
            WAYS[0]: ours,
            WAYS[1]: _told(WAYS[1], entry, limit_seconds, stop),
        }
        if "seconds" in ours and row[WAYS[1]].get("graphs"):
            row["ratio"] = round(row[WAYS[0]]["seconds"] / row[WAYS[1]]["seconds"], 3)
        found[entry.name] = {"commit": commit(), "processor": machine()["processor"], **row}
        console.print(entry.name, row)
        write_result(NAME, {"threads": 1, "limit_seconds": limit_seconds}, found)
    write_page()


if __name__ == "__main__":
    typer.run(main)
