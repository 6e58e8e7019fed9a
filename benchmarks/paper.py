"""The experiment of BladeDISC++ (arXiv 2412.16985, section 5), by plan.

`python -m benchmarks.paper` plans one epoch of CodeAlpaca-20K for Llama-2-1b (four layers of the
dimensions of Llama-2-7B, float32, AdamW) at batch sizes 14, 16 and 18, in four ways:

dynamic
    one program for all lengths without memory optimisation: kernels in the given order, nothing
    computed twice, all logits at once; planned in one arena all the same
static, optimised
    as the next, but every batch is padded to a power of two, as compilers for fixed shapes are used
dynamic, optimised
    one program for all lengths, inside the budget
dynamic, no padding
    the same, and positions that are padding are not computed, which the paper does not have

and beside them PyTorch's: eager, eager with every layer checkpointed, and torch.compile(dynamic=
True) without and with an ``activation_memory_budget``, compiled at the first batch of the epoch.

Memory is exact: the peak of every batch is planned, and that of the longest without a budget is
counted in a dry run of the compiled step, for which address space is reserved; PyTorch's peaks are
counted in dry runs, too (`benchmarks.dry_pytorch`).  No kernel runs: times are those of the plans'
model of a GPU (`benchmarks.memory.full_size`), and PyTorch's kernels are counted by the same rule
(`benchmarks.dry_time`): good for comparison with each other alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.dry_pytorch import CompiledStep, Counted, EagerStep
from benchmarks.memory.full_size import (
    MACHINE,
    SIZES,
    full_size_model,
    full_size_step,
    modelled_ns,
)
from benchmarks.models.document import read_results
from benchmarks.record import commit, machine, write_result
from benchmarks.training.batches import epoch_lengths
from relax_disc.bytes_text import format_bytes, parse_bytes
from relax_disc.pipeline import PipelineOptions
from relax_disc.training.call.packing import rounded
from relax_disc.training_step import TrainingStep
from tutorials._llama import Llama

_PLAIN = PipelineOptions(
    chunk_vocabulary_head=False,
    inline_producers=False,
    join_kernels=False,
    schedule_ops=False,
    rematerialize=False,
    remove_padding=False,
)
_PYTORCH = ("PyTorch", "torch.compile")
_NAMES = ("batch", "length", "tokens")


class PyTorchStep(Protocol):
    """What counts a step of PyTorch's: see `benchmarks.dry_pytorch`."""

    def count(self, rows: int, length: int) -> Counted:
        """Return peak and modelled time of a step at one shape."""
        ...


def power_of_two(length: int) -> int:
    """Return the least power of two that is no less."""
    return 1 << (length - 1).bit_length()


def shape_of(step: TrainingStep, batch: list[int], *, padded: bool) -> tuple[int, ...]:
    """Return sizes for the dims of a step: rows, length and, where there is one, computed tokens.

    ``padded``: the length to a power of two.
    """
    length = power_of_two(max(batch)) if padded else max(batch)
    if "tokens" not in step.session.metadata.dims:
        return len(batch), length
    return len(batch), length, rounded(sum(batch), len(batch) * length)


def plan_epoch(
    step: TrainingStep, batches: list[list[int]], budget: int | None, *, padded: bool
) -> dict[str, Any]:
    """Plan every batch of an epoch; what does not fit is left out, as it would end a run.

    ``batches``: lengths of the records of each. ``budget``: in bytes. ``padded``: to powers of two.
    """
    step.memory_budget = budget
    shapes: Counter[tuple[int, ...]] = Counter()
    tokens: Counter[tuple[int, ...]] = Counter()
    for batch in batches:
        shape = shape_of(step, batch, padded=padded)
        shapes[shape] += 1
        tokens[shape] += sum(batch)
    peak = recomputed = over = done = 0
    nanoseconds = 0.0
    for shape, count in shapes.items():
        sizes = dict(zip(_NAMES, shape, strict=False))
        plan = step.plan(**sizes)
        if not plan.fits:
            over += count
            continue
        nanoseconds += count * modelled_ns(step, plan.shape)
        peak = max(peak, plan.peak_bytes)
        recomputed += count * bool(plan.evicted)
        done += tokens[shape]
    longest = max(shape[1] for shape in shapes)
    return {
        "peak_bytes": peak,
        "longest": longest,
        "batches": len(batches),
        "batches_over_budget": over,
        "batches_recomputing": recomputed,
        "modelled_tokens_per_second": done / nanoseconds * 1e9 if done else None,
    }


def count_unlimited(step: TrainingStep, rows: int, length: int) -> int:
    """Return the peak of a full shape without a budget, in bytes, counted in a dry run.

    Raises `AssertionError`: the plan says another.
    """
    step.memory_budget = None
    plan = step.plan(batch=rows, length=length)
    order = [plan.shape[name] for name in step.session.metadata.dims]
    counted = step.session.measure(order).peak_bytes
    if counted != plan.peak_bytes:
        raise AssertionError(f"planned {plan.peak_bytes} bytes, counted {counted}")
    return counted


def count_pytorch(step: PyTorchStep, batches: list[list[int]], limit: int) -> dict[str, Any]:
    """Count PyTorch's step over an epoch; what is over the limit is left out: it would end a run.

    ``batches``: lengths of the records of each. ``limit``: in bytes.
    """
    shapes = Counter((len(batch), max(batch)) for batch in batches)
    tokens: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        tokens[len(batch), max(batch)] += sum(batch)
    peak = over = done = 0
    nanoseconds = 0.0
    for shape, times in shapes.items():
        counted = step.count(*shape)
        if counted.peak_bytes > limit:
            over += times
            continue
        peak = max(peak, counted.peak_bytes)
        nanoseconds += times * counted.nanoseconds
        done += tokens[shape]
    rows, longest = max(shapes)[0], max(length for _, length in shapes)
    return {
        "unlimited_bytes": step.count(rows, longest).peak_bytes,
        "peak_bytes": peak,
        "longest": longest,
        "batches": len(batches),
        "batches_over_budget": over,
        "modelled_tokens_per_second": done / nanoseconds * 1e9 if done else None,
    }


def pytorch_steps(first: list[int]) -> Iterator[tuple[str, PyTorchStep]]:
    """Make PyTorch's ways of taking the step, by name; ``first``: lengths of the first batch."""
    yield "PyTorch, eager", EagerStep(lambda: Llama(SIZES), MACHINE)
    yield "PyTorch, checkpointing", EagerStep(lambda: Llama(SIZES), MACHINE, checkpointed=True)
    for budget in (1.0, 0.5, 0.3):
        name = "torch.compile" if budget == 1.0 else f"torch.compile, budget {budget}"
        yield name, CompiledStep(full_size_model, MACHINE, len(first), max(first), budget)


def main(
    batches: Annotated[str, typer.Option(help="Records in a batch, separated by commas.")] = (
        "14,16,18"
    ),
    budget: Annotated[str, typer.Option(help="Memory of the device.")] = "40GiB",
    pytorch: Annotated[
        bool, typer.Option("--pytorch", help="PyTorch's rows alone; ours stay as recorded.")
    ] = False,
) -> None:
    """Plan the epochs; prints a table, writes benchmarks/results/paper.json."""
    limit = parse_bytes(budget)
    sizes = [int(size) for size in batches.split(",")]
    settings = {"model": "Llama-2-7B's dimensions, 4 layers", "budget_bytes": limit}
    if pytorch:
        recorded = read_results("paper")
        if recorded["settings"] != settings:
            raise typer.BadParameter("the recorded rows are of another budget")
        of = {"commit": recorded["commit"], "processor": recorded["machine"]["processor"]}
        rows = [{**of, **r} for r in recorded["results"] if not r["way"].startswith(_PYTORCH)]
    else:
        rows = planned(sizes, limit)
    with Progress(console=Console(stderr=True)) as progress:
        for size in progress.track(sizes, description="PyTorch, batch sizes"):
            epoch = epoch_lengths(size)
            for name, peer in pytorch_steps(epoch[0]):
                counted = count_pytorch(peer, epoch, limit)
                rows.append({**_source(), "way": name, "batch": size, **counted})
    rows.sort(key=lambda row: row["batch"])
    path = write_result("paper", settings, rows)
    console = Console()
    console.print(table(rows))
    console.print(str(path))


def planned(sizes: Sequence[int], limit: int) -> list[dict[str, Any]]:
    """Plan an epoch of each batch size in all our ways; ``limit``: in bytes."""
    plain = full_size_step(_PLAIN)
    optimised = full_size_step(PipelineOptions(remove_padding=False))
    ways = {
        "dynamic": (plain, False),
        "static, optimised": (optimised, True),
        "dynamic, optimised": (optimised, False),
        "dynamic, no padding": (full_size_step(), False),
    }
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress:
        for size in progress.track(sizes, description="batch sizes"):
            epoch = epoch_lengths(size)
            for name, (step, padded) in ways.items():
                row = plan_epoch(step, epoch, limit, padded=padded)
                free = count_unlimited(step, size, row["longest"])
                told = {"way": name, "batch": size, "unlimited_bytes": free}
                rows.append({**_source(), **told, **row})
    return rows


def _source() -> dict[str, Any]:
    return {"commit": commit(), "processor": machine()["processor"]}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table for the screen."""
    found = Table(
        "way", "batch", "without a budget", "peak", "over it", "recomputing", "tokens/s, modelled"
    )
    for row in rows:
        rate = row.get("modelled_tokens_per_second")
        found.add_row(
            row["way"],
            str(row["batch"]),
            format_bytes(row["unlimited_bytes"]),
            format_bytes(row["peak_bytes"]),
            f"{row['batches_over_budget']} of {row['batches']}",
            str(row.get("batches_recomputing", "-")),
            "-" if rate is None else f"{rate:,.0f}",
        )
    return found


if __name__ == "__main__":
    typer.run(main)
