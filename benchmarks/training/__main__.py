"""Time a whole training step next to eager PyTorch and torch.compile, on real lengths.

`python -m benchmarks.training` trains Llama S and M (4 layers; hidden 256 and 512; 32,000 tokens;
float32, AdamW) on batches of the lengths of CodeAlpaca.  Each variant lives in a process of its
own; every batch goes to all of them in turn, in a random order, so that whatever else the machine
does hits all alike, and ratios are taken batch by batch.  Memory is what malloc and mmap hold above
parameters and optimizer state.

What leaving padding out is worth, on padded batches and on those without padding:

    python -m benchmarks.training --variants relax_disc,relax_disc:padded --batch 8,14 \
        --count 10 --name training_padding
    python -m benchmarks.training --variants relax_disc,relax_disc:padded --batch 8,14 \
        --sizes 1b --count 2 --unseen 0 --warm-up 0 --name training_padding_1b
    python -m benchmarks.training --variants relax_disc,packed,packed-compile:padded --batch 8 \
        --sizes S --count 10 --unseen 0 --name training_packed

Without padding, where every position has a label and all ways compute the same:

    python -m benchmarks.training --full --unseen 0 --variants compile,compile-fused,relax_disc \
        --name training_full
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.record import write_result
from benchmarks.training.batches import real_batches
from benchmarks.training.measure import measure, started
from benchmarks.training.report import summarize, summary_table
from benchmarks.training.worker import SIZES, VARIANTS
from relax_disc.vm_builtins import native


def main(
    sizes: Annotated[str, typer.Option(help="Models, separated by commas.")] = "S,M",
    batch: Annotated[str, typer.Option(help="Records in a batch, separated by commas.")] = "4,8",
    count: Annotated[int, typer.Option(help="Batches of real lengths.")] = 40,
    unseen: Annotated[int, typer.Option(help="Lengths for first against second step.")] = 32,
    variants: Annotated[
        str, typer.Option(help=f"Of {', '.join(VARIANTS)}; separated by commas.")
    ] = "eager,compile,relax_disc",
    threads: Annotated[int, typer.Option(help="Of every variant.")] = 2,
    warm_up: Annotated[int, typer.Option(help="Batches that are not counted.")] = 2,
    full: Annotated[
        bool,
        typer.Option("--full", help="Records as long as their batch's longest."),
    ] = False,
    name: Annotated[str, typer.Option(help="Of the file of results.")] = "training",
) -> None:
    """Compare training steps; prints a table, writes benchmarks/results/<name>.json."""
    names = variants.split(",")
    for kind, given, known in (("size", sizes.split(","), SIZES), ("variant", names, VARIANTS)):
        for value in given:
            if value.partition(":")[0] not in known:
                raise typer.BadParameter(f"{value!r} is no {kind}; known: {', '.join(known)}")
    native.load()  # built once per machine: no part of a compilation
    console = Console()
    # The table has ten columns; a pipe would get 80 characters.
    console.width = max(console.width, 150)
    settings = {"count": count, "unseen": unseen, "threads": threads, "variants": names}
    settings |= {"full": True} if full else {}
    runs = []
    for size in sizes.split(","):
        for records in map(int, batch.split(",")):
            batches = real_batches(records, count)
            if full:
                batches = [[max(lengths)] * records for lengths in batches]
            with ExitStack() as stack, Progress(console=console, transient=True) as progress:
                progress.add_task(f"{size}, batch {records}: compiling", total=None)
                workers = [stack.enter_context(started(n, size, threads)) for n in names]
                results = measure(workers, batches, unseen, progress, warm_up)
            summary = summarize(results)
            console.print(summary_table(f"Llama {size}, batch {records}", summary))
            runs.append({"size": size, "batch": records, "summary": summary, "raw": results})
            console.print(f"written to {write_result(name, settings, runs)}")


if __name__ == "__main__":
    typer.run(main)
