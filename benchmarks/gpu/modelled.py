"""The GPU suite's comparison by plan, for as long as no GPU has measured it.

`python -m benchmarks.gpu.modelled` takes the model of `benchmarks.paper` (four layers of
Llama-2-7B, float32, AdamW) at batch 14, 16 and 18, at the median and at the greatest length of the
batches of CodeAlpaca, nothing left out as padding. It tells how long a step takes, and what it
needs above parameters and optimizer's state, by PyTorch's ways and by ours: without a budget, and
with budgets that are shares of torch.compile's activations. Memory is exact, of dry runs and plans
(`benchmarks.dry_pytorch`); times are those of a model of a GPU, the same rule for all kernels
(`benchmarks.dry_time`): **modelled, not measured**.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.memory.full_size import MACHINE, full_size_step, modelled_ns
from benchmarks.paper import pytorch_steps
from benchmarks.record import write_result
from benchmarks.training.batches import epoch_lengths
from relax_disc.pipeline import PipelineOptions
from relax_disc.training_step import TrainingStep

NAME = "modelled_gpu"
SHARES = (0.7, 0.45, 0.33)
REFERENCE = "torch.compile"


def rows_of_ours(
    step: TrainingStep, rows: int, length: int, reference_bytes: int
) -> Iterator[dict[str, Any]]:
    """Plan a shape without a budget, and within shares of another's activations (bytes)."""
    step.memory_budget = None
    free = step.plan(batch=rows, length=length)
    state = free.peak_bytes - free.activation_peak_bytes
    for share in (None, *SHARES):
        step.memory_budget = None if share is None else state + int(share * reference_bytes)
        plan = step.plan(batch=rows, length=length)
        yield {
            "way": "relax_disc" if share is None else f"relax_disc, {share} of its activations",
            "fits": plan.fits,
            "activation_bytes": plan.activation_peak_bytes,
            "milliseconds": modelled_ns(step, plan.shape) / 1e6,
        }


def compared(
    step: TrainingStep, first: list[int], lengths: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Compare at batches of some lengths; ``first``: of the records that PyTorch compiles with."""
    peers = list(pytorch_steps(first))
    # Parameters and two moments of AdamW; gradients count as activations in all ways.
    state = 3 * sum(parameter.nbytes for parameter in step.model.parameters())
    for length in lengths:
        found = []
        for name, peer in peers:
            counted = peer.count(len(first), length)
            activations = counted.peak_bytes - state
            facts = {"activation_bytes": activations, "milliseconds": counted.nanoseconds / 1e6}
            found.append({"way": name, "fits": True, **facts})
        (reference,) = (row["activation_bytes"] for row in found if row["way"] == REFERENCE)
        best = min(row["milliseconds"] for row in found)
        found += rows_of_ours(step, len(first), length, reference)
        for row in found:
            rate = round(best / row["milliseconds"], 3) if row["fits"] else None
            shape = {"batch": len(first), "length": length}
            told = {
                "of_reference": round(row["activation_bytes"] / reference, 3),
                "speed_of_best": rate,
            }
            yield shape | row | told


def main(batches: Annotated[str, typer.Option(help="Records, by commas.")] = "14,16,18") -> None:
    """Compare; prints a table, writes benchmarks/results/modelled_gpu.json."""
    step = full_size_step(PipelineOptions(remove_padding=False))
    results = []
    for size in map(int, batches.split(",")):
        epoch = epoch_lengths(size)
        lengths = [max(batch) for batch in epoch]
        results += compared(step, epoch[0], (int(statistics.median(lengths)), max(lengths)))
    settings = {"model": "Llama-2-7B's dimensions, 4 layers", "modelled": asdict(MACHINE)}
    path = write_result(NAME, settings, results)
    table = Table("batch", "length", "way", "activations", "ms, modelled", "speed of the best way")
    for row in results:
        table.add_row(
            *(str(row[key]) for key in ("batch", "length", "way")),
            f"{row['of_reference']:.2f}",
            f"{row['milliseconds']:.1f}" if row["fits"] else "does not fit",
            str(row["speed_of_best"]),
        )
    Console().print(table)
    print(path)


if __name__ == "__main__":
    typer.run(main)
