"""The same training, with padding left out and with padding computed
====================================================================

Two models with equal weights take the same batches in turn.  One step computes the positions that
can reach the loss, the other is told to compute all of them.

    python tutorials/padding.py
"""  # noqa: D205, D400

from __future__ import annotations

import time
from typing import Annotated

import typer
from _setup import Settings, make_batches, make_model, smoke_settings
from rich.console import Console
from rich.table import Table
from torch.export import Dim

import relax_disc
from relax_disc.bytes_text import format_bytes


def main(
    steps: Annotated[int, typer.Option(help="Steps of each of the two.")] = 12,
    smoke: Annotated[bool, typer.Option(help="Tiny sizes, to see that everything works.")] = False,
) -> None:
    """Train both and compare real tokens per second and the highest peak of activations."""
    console = Console()
    settings = smoke_settings(Settings()) if smoke else Settings()
    data = make_batches(settings)
    batches = [data[number] for number in range(min(steps, 4) if smoke else steps)]
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=settings.longest)}
    example = (batches[0].ids, batches[0].labels)
    runs = []
    for is_left_out in (True, False):
        model, optimizer = make_model(settings)  # from the seed: both start alike
        step = relax_disc.compile(
            model,
            optimizer,
            example,
            dynamic_shapes={"ids": shape, "labels": shape},
            options=relax_disc.PipelineOptions(remove_padding=is_left_out),
        )
        runs.append(step)
    console.print(str(runs[0].padding_report()))

    losses, seconds, peaks = ([[], []] for _ in range(3))
    for batch in batches:
        for k, step in enumerate(runs):
            start = time.perf_counter()
            losses[k].append(step(batch.ids, batch.labels).item())
            seconds[k].append(time.perf_counter() - start)
            peaks[k].append(step.memory_report().activation_peak_bytes)
    real, positions = sum(b.tokens for b in batches), sum(b.ids.numel() for b in batches)
    table = Table(title=f"{len(batches)} steps; {real / positions:.0%} of the positions are real")
    for title in ("", "padding left out", "all positions"):
        table.add_column(title, justify="right" if title else "left")
    table.add_row("real tokens per second", *(f"{real / sum(each):,.0f}" for each in seconds))
    table.add_row("most activations", *(format_bytes(max(each)) for each in peaks))
    table.add_row("last loss", *(f"{each[-1]:.5f}" for each in losses))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
