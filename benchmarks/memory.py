"""What a memory budget costs: measured on this machine, and modelled at full size.

`python -m benchmarks.memory` trains Llama S (or M) on real lengths at several budgets, in turn
batch by batch, and reports peaks, recomputations and time against the same step without a budget.
`python -m benchmarks.memory --full-size` plans four layers of Llama-2-7B (float32, AdamW) for a
GPU of 500 TFLOP/s, 4 TB/s and 3 us a kernel: nothing is touched but address space, and no kernel
runs.  Budgets are fractions of the unlimited activation peak of each shape.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.export import Dim

import relax_disc
from benchmarks.record import write_result
from benchmarks.training_batches import LONGEST, VOCABULARY, make_batch, real_batches
from benchmarks.training_worker import SIZES
from relax_disc.training_step import TrainingStep
from tutorials._llama import Llama, LlamaSizes

FRACTIONS = (0.75, 0.5, 1 / 3, 0.25)
# A data-centre GPU: float32 matrix products at tensor-core rate, memory, one kernel's launch.
FLOPS_PER_NS, BYTES_PER_NS, KERNEL_NS = 500_000.0, 4_000.0, 3_000.0
GIB = 2**30


def budget_of(step: TrainingStep, fraction: float, **shape: int) -> int:
    """Bytes that leave a fraction of the unlimited activation peak of a shape."""
    step.memory_budget = None
    plan = step.plan(**shape)
    return plan.peak_bytes - plan.activation_peak_bytes + int(plan.activation_peak_bytes * fraction)


def plan_full_size(batches: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    """Plan Llama-2-7B's layers at shapes and budgets; one row each."""
    sizes = LlamaSizes(
        vocabulary=VOCABULARY, layers=4, hidden=4096, heads=32, feed_forward=11008, longest=2048
    )
    with torch.device("meta"):
        model = Llama(sizes)
    model.to_empty(device="cpu")  # address space: no page is touched before a kernel writes it
    step = _compile(model, batch=64, longest=2048)
    step.session.set_cost_model(FLOPS_PER_NS, BYTES_PER_NS, KERNEL_NS)
    rows = []
    for batch in batches:
        for length in lengths:
            shape = {"batch": batch, "length": length}
            step.memory_budget = None
            free = step.plan(**shape)
            rows.append(_row(shape, 1.0, free, free.activation_peak_bytes, 0.0))
            for fraction in FRACTIONS:
                step.memory_budget = budget_of(step, fraction, **shape)
                start = time.perf_counter()
                plan = step.plan(**shape)
                seconds = time.perf_counter() - start
                rows.append(_row(shape, fraction, plan, free.activation_peak_bytes, seconds))
    with step.session.dry_run():
        step.memory_budget = None
        ids = torch.zeros(batches[-1], lengths[-1], dtype=torch.long)
        step(ids, ids)
    report = step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes
    return rows


def _row(
    shape: dict[str, int], fraction: float, plan: Any, free_bytes: int, seconds: float
) -> dict[str, Any]:
    return {
        **shape,
        "fraction": fraction,
        "fits": plan.fits,
        "activation_peak_bytes": plan.activation_peak_bytes,
        "of_unlimited": plan.activation_peak_bytes / free_bytes,
        "time_ratio": plan.time_ratio if plan.fits else None,
        "recomputations": len(plan.evicted),
        "planning_seconds": seconds,
    }


def sweep(size: str, batch: int, count: int) -> list[dict[str, Any]]:
    """Take real steps at every budget, in turn; one row per budget."""
    torch.manual_seed(0)
    sizes = LlamaSizes(
        vocabulary=VOCABULARY, layers=4, heads=8, longest=LONGEST, attention="fused", **SIZES[size]
    )
    step = _compile(Llama(sizes), batch=64, longest=LONGEST)
    taken: dict[float, list[dict[str, float]]] = {f: [] for f in (1.0, *FRACTIONS)}
    for index, lengths in enumerate([*real_batches(batch, 2), *real_batches(batch, count)]):
        ids, labels = make_batch(lengths, index)
        shape = {"batch": ids.shape[0], "length": ids.shape[1]}
        for fraction, results in taken.items():
            budget = None if fraction == 1.0 else budget_of(step, fraction, **shape)
            step.memory_budget = budget
            plan = step.plan(**shape)
            if not plan.fits:
                continue
            start = time.perf_counter()
            step(ids, labels)
            seconds = time.perf_counter() - start
            report = step.memory_report()
            assert report.peak_bytes == report.planned_peak_bytes == plan.peak_bytes
            assert budget is None or report.peak_bytes <= budget
            if index >= 2:  # the first two warm up
                results.append(
                    {
                        "batch": index,
                        "seconds": seconds,
                        "bytes": report.activation_peak_bytes,
                        "recomputations": report.recomputations,
                        "modelled": plan.time_ratio,
                    }
                )
    return [_summary(fraction, results, taken[1.0]) for fraction, results in taken.items()]


def _summary(
    fraction: float, results: list[dict[str, float]], free: list[dict[str, float]]
) -> dict[str, Any]:
    base = {row["batch"]: row for row in free}
    ratios = sorted(row["seconds"] / base[row["batch"]]["seconds"] for row in results)
    memory = [row["bytes"] / base[row["batch"]]["bytes"] for row in results]
    return {
        "fraction": fraction,
        "batches": len(results),
        "activation_ratio": median(memory) if memory else None,
        "time_ratio": median(ratios) if ratios else None,
        "time_ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
        if ratios
        else None,
        "modelled_time_ratio": median(row["modelled"] for row in results) if results else None,
        "recomputations": median(row["recomputations"] for row in results) if results else None,
    }


def _compile(model: torch.nn.Module, *, batch: int, longest: int) -> TrainingStep:
    shape = {0: Dim("batch", min=1, max=batch), 1: Dim("length", min=1, max=longest)}
    return relax_disc.compile(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        make_batch([24, 16], seed=0),
        dynamic_shapes={"ids": shape, "labels": shape},
    )


def _print(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    Console(width=160).print(table)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " - ".join(f"{x:.3f}" for x in value)
    if name.endswith("_bytes"):
        return f"{value / GIB:.3f} GiB"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(
    full_size: Annotated[bool, typer.Option(help="Plan Llama-2-7B's layers, run nothing.")] = False,
    size: Annotated[str, typer.Option(help="S or M.")] = "S",
    batch: Annotated[int, typer.Option(help="Records in a batch.")] = 4,
    count: Annotated[int, typer.Option(help="Batches to measure.")] = 20,
) -> None:
    """Print the table and write it to benchmarks/results."""
    if full_size:
        rows = plan_full_size([14, 16, 18], [279, 512])
        _print(rows, "Llama-2-7B, 4 layers, float32, AdamW: modelled")
        name, settings = "memory_full_size", {"model": "Llama-2-7B, 4 layers"}
    else:
        rows = sweep(size, batch, count)
        _print(rows, f"Llama {size}, batch {batch}, real lengths: measured")
        name, settings = f"memory_{size}", {"size": size, "batch": batch, "count": count}
    print("written to", write_result(name, settings, rows))


if __name__ == "__main__":
    typer.run(main)
