"""Step times of two checkouts of this package, interleaved.

Each runs in a process of its own with as many threads; batches of real lengths go to both in turn,
first to one, then to the other.  The losses must agree.

Run ``python -m benchmarks.versions OTHER_CHECKOUT [--size S]``; writes
benchmarks/results/versions_<size>.json.
"""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.record import write_result
from benchmarks.training.batches import real_batches
from benchmarks.training.measure import started

_WARM_UP = 5
_ROOT = Path(__file__).parents[1]


def main(
    other: Annotated[Path, typer.Argument(help="A checkout of another commit.")],
    size: Annotated[str, typer.Option(help="Of the Llama: S or M.")] = "S",
    batch: Annotated[int, typer.Option(help="Records in a batch.")] = 4,
    count: Annotated[int, typer.Option(help="Batches that are timed.")] = 40,
    threads: Annotated[int, typer.Option(help="Of each process.")] = 2,
) -> None:
    """Print this checkout's step time over the other's, and write it down."""
    batches = real_batches(batch, count + _WARM_UP)
    ratios: dict[str, list[float]] = {"seconds": [], "cpu_seconds": []}
    peaks = []
    with (
        started("relax_disc", size, threads) as mine,
        started("relax_disc", size, threads, other.resolve()) as theirs,
    ):
        for number, lengths in enumerate(batches):
            order = (mine, theirs) if number % 2 else (theirs, mine)
            found = {id(one): one.ask(lengths=lengths, seed=number) for one in order}
            a, b = found[id(mine)], found[id(theirs)]
            if abs(a["loss"] - b["loss"]) > 1e-3 * abs(b["loss"]):
                raise RuntimeError(f"batch {number}: losses {a['loss']} and {b['loss']} differ")
            if number >= _WARM_UP:
                for key, row in ratios.items():
                    row.append(a[key] / b[key])
                peaks.append(a["planned_peak_bytes"] / b["planned_peak_bytes"])
    results = {}
    for key, row in (*ratios.items(), ("planned_peak_bytes", peaks)):
        low, middle, high = statistics.quantiles(row, n=4)
        results[key] = {"median": middle, "quartiles": [low, high]}
        print(f"{key}: {middle:.3f} ({low:.3f}-{high:.3f}) of the other's")
    settings = {
        "size": size, "batch": batch, "count": count, "threads": threads, "other": _commit(other),
    }  # fmt: skip
    print(write_result(f"versions_{size}", settings, results).relative_to(_ROOT))


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    typer.run(main)
