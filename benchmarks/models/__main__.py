"""The table of models: `python -m benchmarks.models` fills it, `--write-docs` prints it as docs.

`--speed` times them at a realistic width instead (`benchmarks.models.speed`).

Every model is compiled and trained in a process of its own with a limit of time, so that one
failure does not stop the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.models.catalogue import ENTRIES
from benchmarks.models.document import PAGE, read_results, result_path, summary_table, write_page
from benchmarks.models.entry import Entry
from benchmarks.models.speed import run as run_speed
from benchmarks.models.speed_document import write_page as write_speed_page
from benchmarks.record import commit, without_folders, write_result
from relax_disc.vm_builtins import native

_ROOT = Path(__file__).parents[2]


def told_by(
    module: str, *arguments: str, limit_seconds: float, **environment: str
) -> dict[str, Any]:
    """Return what a module tells as JSON in a process of its own; its failure is a verdict."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            timeout=limit_seconds,
            cwd=_ROOT,
            env={
                **os.environ,
                "RELAX_DISC_COMPILE_CACHE": "0",
                "HF_HUB_OFFLINE": "1",
                **environment,
            },
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "failed", "message": f"not done in {limit_seconds:.0f} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        message = f"the process ended with {done.returncode}: {without_folders(last)}"
        return {"verdict": "failed", "message": message}
    return json.loads(without_folders(done.stdout))


def judged(entry: Entry, limit_seconds: float) -> dict[str, Any]:
    """Judge one model in a process of its own; what goes wrong there becomes the verdict."""
    facts = {
        "model": entry.name,
        "source": entry.source,
        "symbols": list(entry.ranges),
        "commit": commit(),
    }
    worker = "benchmarks.models.worker"
    found = told_by(worker, entry.name, limit_seconds=limit_seconds, OMP_NUM_THREADS="1")
    return {**facts, **found}


def chosen(only: str) -> Sequence[Entry]:
    """Entries whose name contains one of the words, separated by commas; all without words."""
    words = [word.strip().lower() for word in only.split(",") if word.strip()]
    found = [e for e in ENTRIES if not words or any(word in e.name.lower() for word in words)]
    if not found:
        raise typer.BadParameter(f"no model's name contains {only!r}")
    return found


def merged(name: str, found: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Results in the table's order: those just found, the recorded ones of all other models."""
    recorded = {} if not result_path(name).exists() else read_results(name)["results"]
    by_model = {**{result["model"]: result for result in recorded}, **found}
    return [by_model[entry.name] for entry in ENTRIES if entry.name in by_model]


def main(
    only: Annotated[str, typer.Option(help="Words in the names of models, by commas.")] = "",
    limit_seconds: Annotated[float, typer.Option(help="Of one model's process.")] = 900.0,
    jobs: Annotated[int, typer.Option(help="Processes at once; times are of processors.")] = 1,
    name: Annotated[str, typer.Option(help="Of the file of results.")] = "models",
    write_docs: Annotated[
        bool, typer.Option("--write-docs", help="Write the pages from the results; run none.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Time wide models next to eager PyTorch instead.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="With --speed: torch.compile(dynamic=True) too.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --speed: only what has no results.")
    ] = False,
    autocast: Annotated[
        bool, typer.Option("--autocast", help="With --speed: forward passes in bfloat16.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=2, help="With --speed: measurements of a shape.")] = 8,
    threads: Annotated[int, typer.Option(help="With --speed: of each process.")] = 2,
) -> None:
    """Judge the models; prints a table, writes benchmarks/results/<name>.json as it goes.

    Results of models that are not run stay as they were recorded; each has its own commit.
    """
    if speed:
        words = [word.strip().lower() for word in only.split(",") if word.strip()]
        run_speed(
            words,
            with_compile=compiled,
            resume=resume,
            rounds=rounds,
            limit_seconds=limit_seconds,
            threads=threads,
            name=("models_speed_autocast" if autocast else "models_speed")
            if name == "models"
            else name,
            autocast=autocast,
        )
        return
    console = Console()
    console.width = max(console.width, 150)
    if write_docs:
        write_speed_page()
        write_page()
        console.print(f"written to {PAGE}")
        return
    native.load()  # built once per machine: no part of a compilation
    settings = {
        "threads": 1,
        "limit_seconds": limit_seconds,
        "optimizer": "SGD, momentum 0.9",
        "transformers": metadata.version("transformers"),
    }
    found: dict[str, dict[str, Any]] = {}
    with Progress(console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(judged, entry, limit_seconds) for entry in chosen(only)]
        for done in progress.track(as_completed(waiting), len(waiting), description="models"):
            result = done.result()
            found[result["model"]] = result
            path = write_result(name, settings, merged(name, found))
            progress.console.print(f"{result['model']}: {result['verdict']}")
    console.print(summary_table(list(found.values())))
    console.print(f"written to {path}")
    if name == "models":
        write_page()
        console.print(f"written to {PAGE}")


if __name__ == "__main__":
    typer.run(main)
