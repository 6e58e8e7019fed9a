"""Tables of `benchmarks.memory`: medians of paired ratios, peaks, what ran again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.training.report import median_with_interval

MIB, GIB = 2**20, 2**30


def summarize_sweep(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Summarize the rows of one model and batch size, one summary per way of training.

    Parameters
    ----------
    rows : sequence of mappings
        As `benchmarks.memory.sweep` makes them.

    Returns
    -------
    list of dict
        ``time_ratio`` is over the step without a budget, ``peak_ratio`` over torch.compile's peak
        on the same batch, both [median, low, high]; ``run_time_ratio`` compares the times of all
        batches together, ``highest_*`` the highest peaks.
    """
    names = list(rows[0]["ways"])
    ordered = sorted(names, key=lambda name: ("fits" in rows[0]["ways"][name], names.index(name)))
    base = max(row["ways"]["compile"]["activation_peak_bytes"] for row in rows)
    summaries = []
    for name in ordered:
        ways = [row["ways"][name] for row in rows]
        free = [row["ways"]["no budget"] for row in rows]
        compiled = [row["ways"]["compile"] for row in rows]
        peaks = [_peak(way) for way in ways]
        highest = max(peaks)
        summaries.append(
            {
                "way": name,
                "time_ratio": _paired(ways, free, "seconds"),
                "run_time_ratio": sum(w["seconds"] for w in ways) / sum(f["seconds"] for f in free),
                "time_over_compile": _paired(ways, compiled, "seconds"),
                "peak_ratio": median_with_interval(
                    [p / c["activation_peak_bytes"] for p, c in zip(peaks, compiled, strict=True)]
                ),
                "highest_peak_bytes": highest,
                "highest_counted_bytes": max(way["activation_peak_bytes"] for way in ways),
                "highest_ratio": highest / base,
                "recomputations": _median(ways, "recomputations"),
                "modelled_time_ratio": _median(ways, "modelled_time_ratio"),
                "within_budget": [way["fits"] for way in ways].count(True)
                if "fits" in ways[0]
                else None,
            }
        )
    return summaries


def sweep_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out the rows of one model and batch size for a terminal."""
    headings = (
        "way",
        "time / no budget",
        "whole run",
        "time / compile",
        "peak / compile",
        "highest, MiB",
        "counted, MiB",
        "highest / compile",
        "run again",
        "modelled",
        "fits",
    )
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in summarize_sweep(rows):
        table.add_row(
            row["way"],
            _interval(row["time_ratio"]),
            f"{row['run_time_ratio']:.3f}",
            _interval(row["time_over_compile"]),
            _interval(row["peak_ratio"]),
            f"{row['highest_peak_bytes'] / MIB:,.1f}",
            f"{row['highest_counted_bytes'] / MIB:,.1f}",
            f"{row['highest_ratio']:.3f}",
            _number(row["recomputations"], 0),
            _number(row["modelled_time_ratio"], 3),
            "-" if row["within_budget"] is None else f"{row['within_budget']}/{len(rows)}",
        )
    return table


def print_rows(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of plain values as a table."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    console.print(table)


def _peak(way: Mapping[str, Any]) -> int:
    """Bytes above parameters and optimizer state: our own account, or what malloc counted."""
    return way.get("accounted_activation_bytes", way["activation_peak_bytes"])


def _paired(
    ways: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], key: str
) -> list[float]:
    return median_with_interval([a[key] / b[key] for a, b in zip(ways, base, strict=True)])


def _median(ways: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return median(way[key] for way in ways) if key in ways[0] else None


def _interval(values: Sequence[float]) -> str:
    middle, low, high = values
    return f"{middle:.3f} ({low:.2f}-{high:.2f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / GIB:.3f} GiB" if value >= GIB else f"{value / MIB:.2f} MiB"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
