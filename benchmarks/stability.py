"""Repeat the measurements of README's table, to see whether its ratios stay within 5 %.

    python -m benchmarks.stability --runs 3

Each run takes what `python -m benchmarks.training` takes for the table's rows, by several sets of
processes in turn: one process of torch.compile differs from another of the same program by up to
7 % of its time, whichever batches it gets.  The spread of a ratio is its highest median over its
lowest, less 1.  How many cores other processes took is recorded with every run: figures count on a
quiet machine only.  Runs are written as they come; `--resume` goes on where an interrupted command
stopped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.models.document import read_results, result_path
from benchmarks.processes import machine_cpu_seconds
from benchmarks.record import commit, machine, write_result
from benchmarks.training.batches import real_batches
from benchmarks.training.measure import measure, started
from benchmarks.training.report import summarize
from relax_disc.vm_builtins import native

NAME = "stability"
ROWS = (("S", 4), ("M", 8))
"""Of README's table: size and batch."""
VARIANTS = ("eager", "compile", "relax_disc")
WITHIN = 0.05


def spreads(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, for each row, by how much each ratio's highest median is above its lowest."""
    found: dict[str, dict[str, float]] = {}
    for row in dict.fromkeys(run["row"] for run in runs):
        ratios = [run["ratios"] for run in runs if run["row"] == row]
        found[row] = {key: max(r[key] for r in ratios) / min(r[key] for r in ratios) - 1
                      for key in ratios[0]}  # fmt: skip
    return found


def _run(
    size: str, records: int, count: int, starts: int, threads: int, progress: Progress
) -> dict[str, Any]:
    """Measure one row once; ratios are medians over batches, other work is in cores."""
    batches = real_batches(records, count)
    results: dict[str, dict[str, Any]] = {}
    other = seconds = 0.0
    for start in range(starts):
        with ExitStack() as stack:
            workers = [stack.enter_context(started(name, size, threads)) for name in VARIANTS]
            own = sum(worker.cpu_seconds() for worker in workers)
            all_of_it, began = machine_cpu_seconds(), time.perf_counter()
            part = measure(workers, batches[start::starts], 0, progress)
            own = sum(worker.cpu_seconds() for worker in workers) - own
            other += machine_cpu_seconds() - all_of_it - own
            seconds += time.perf_counter() - began
        for name, result in part.items():
            results.setdefault(name, {**result, "steps": []})["steps"] += result["steps"]
    summary = summarize(results)["relax_disc"]
    ratios = {f"step / {base}": summary["time_ratio"][base][0] for base in VARIANTS[:2]}
    ratios |= {f"peak / {base}": summary["peak_ratio"][base][0] for base in VARIANTS[:2]}
    return {"row": f"{size}, {records}", "ratios": ratios, "other_work": max(0.0, other / seconds)}


def main(
    runs: Annotated[int, typer.Option(min=2, help="Of every row.")] = 3,
    count: Annotated[int, typer.Option(help="Batches of real lengths.")] = 40,
    starts: Annotated[int, typer.Option(min=1, help="Processes of each way that share them.")] = 3,
    threads: Annotated[int, typer.Option(help="Of every variant.")] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the file's runs.")] = False,
    rows: Annotated[str, typer.Option(help="Size:batch, separated by commas.")] = ",".join(
        f"{size}:{batch}" for size, batch in ROWS
    ),
    name: Annotated[str, typer.Option(help="Of the file of results.")] = NAME,
) -> None:
    """Measure the rows several times; exit code 1 where a ratio is not stable."""
    native.load()  # built once per machine: no part of a compilation
    console = Console()
    settings = {"count": count, "starts": starts, "threads": threads}
    done: list[dict[str, Any]] = []
    if resume and result_path(name).exists():
        kept = read_results(name)
        if kept["settings"] != settings or kept["machine"] != machine():
            raise typer.BadParameter(f"{result_path(name)} is of other settings or machines")
        done = kept["results"]["runs"]
    for number in range(runs):
        for size, batch in (row.split(":") for row in rows.split(",")):
            if sum(run["row"] == f"{size}, {batch}" for run in done) > number:
                continue
            with Progress(console=console, transient=True) as progress:
                run = _run(size, int(batch), count, starts, threads, progress)
            done.append({"commit": commit(), **run})
            console.print(run)
            write_result(name, settings, {"runs": done, "spreads": spreads(done)})
    table = Table("Llama, batch", "ratio", *(f"run {n + 1}" for n in range(runs)), "spread")
    found = spreads(done)
    for row, by_ratio in found.items():
        for key, spread in by_ratio.items():
            medians = [f"{run['ratios'][key]:.3f}" for run in done if run["row"] == row][:runs]
            table.add_row(row, key, *medians, f"{spread:.1%}")
    console.print(table)
    console.print(f"other work: at most {max(run['other_work'] for run in done):.2f} cores")
    if any(spread > WITHIN for by_ratio in found.values() for spread in by_ratio.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
