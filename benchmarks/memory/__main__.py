"""What a memory budget costs and what it saves: everything about the memory of a step.

`python -m benchmarks.memory` runs all parts; `--parts` chooses some:

``full-size``
    Llama-2-7B's layers, four of them, planned at half, a third and a quarter of their activations.
``epoch``
    The same step over all batches of an epoch of CodeAlpaca: footprint against the largest step.
``partitioner``
    The same step by the plans of PyTorch's min-cut partitioner, and by ours within their peaks.
``static``
    Peaks of one dynamic compilation against those of static ones, Llama S.
``sweep``
    Llama S and M trained on real lengths at several budgets, next to torch.compile with and without
    its own knob and to layer checkpointing.  Takes long: limit it with `--sizes`, `--count` and
    `--time-limit`; `--resume` goes on where it stopped.

Each part writes a file of its name in benchmarks/results.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from benchmarks.memory.full_size import full_size_step, plan_full_size
from benchmarks.memory.partitioner import compare_plans
from benchmarks.memory.report import print_rows
from benchmarks.memory.shapes import EPOCH_BATCH, STATIC_SHAPES, against_static, over_epoch
from benchmarks.memory.sweep import sweep
from benchmarks.record import write_result
from relax_disc.vm_builtins import native

PARTITIONED = ((14, 279), (18, 279), (14, 512), (18, 512))
PARTS = ("full-size", "epoch", "partitioner", "static", "sweep")


def main(
    parts: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(PARTS),
    full_size: Annotated[bool, typer.Option(help="The same as --parts full-size.")] = False,
    sizes: Annotated[str, typer.Option(help="Of the sweep: S, M.")] = "S,M",
    batch: Annotated[str, typer.Option(help="Of the sweep: records in a batch.")] = "4,8",
    count: Annotated[int, typer.Option(help="Of the sweep: batches of real lengths.")] = 20,
    variants: Annotated[
        str, typer.Option(help="Of the sweep: PyTorch's ways.")
    ] = "compile,compile:0.5,compile:0.3,checkpoint",
    threads: Annotated[int, typer.Option(help="Of the sweep.")] = 2,
    time_limit: Annotated[float, typer.Option(help="Of the sweep, in minutes.")] = 120.0,
    resume: Annotated[bool, typer.Option(help="Of the sweep: go on where it stopped.")] = False,
    name: Annotated[str, typer.Option(help="Of the sweep's results.")] = "memory_sweep",
) -> None:
    """Print tables and write them to benchmarks/results."""
    chosen = ["full-size"] if full_size else parts.split(",")
    for part in chosen:
        if part not in PARTS:
            raise typer.BadParameter(f"{part!r} is no part; known: {', '.join(PARTS)}")
    native.load()  # built once per machine: no part of what is measured
    console = Console()
    console.width = max(console.width, 160)
    if "full-size" in chosen or "epoch" in chosen or "partitioner" in chosen:
        full_size_parts(chosen, console)
    if "static" in chosen:
        rows = against_static("S", STATIC_SHAPES)
        print_rows(console, "Llama S, one dynamic compilation against static ones", rows)
        write_result("memory_static", {"size": "S"}, rows)
    if "sweep" in chosen:
        sweep(
            sizes.split(","),
            [int(n) for n in batch.split(",")],
            count=count,
            variants=variants.split(","),
            threads=threads,
            time_limit=time_limit,
            name=name,
            resume=resume,
            console=console,
        )


def full_size_parts(chosen: list[str], console: Console) -> None:
    """Run the parts that plan Llama-2-7B's layers."""
    step = full_size_step()
    if "full-size" in chosen:
        rows = plan_full_size(step, [14, 16, 18], [279, 512])
        print_rows(console, "Llama-2-7B, 4 layers, float32, AdamW: modelled", rows)
        write_result("memory_full_size", {"model": "Llama-2-7B, 4 layers"}, rows)
    if "epoch" in chosen:
        rows = over_epoch(step, EPOCH_BATCH, (1 / 2, 1 / 3, 1 / 4))
        print_rows(console, "One epoch of CodeAlpaca, Llama-2-7B, 4 layers: planned", rows)
        write_result("memory_epoch", {"batch": EPOCH_BATCH}, rows)
    if "partitioner" in chosen:
        rows = [row for shape in PARTITIONED for row in compare_plans(step, *shape)]
        print_rows(console, "PyTorch's partitioner's plans, and ours within their peaks", rows)
        write_result("memory_partitioner", {"model": "Llama-2-7B, 4 layers"}, rows)


if __name__ == "__main__":
    typer.run(main)
