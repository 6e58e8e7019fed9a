"""Medians of paired ratios with their intervals, from the measurements of `benchmarks.training`.

`python -m benchmarks.training.report [file.json]` prints a file of results as Markdown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.record import RESULTS

_RESAMPLES = 10_000
_PADDED = "relax_disc:padded"
_BASES = ("eager", "compile", "compile-fused", _PADDED, "packed", "packed-compile:padded")


def median_with_interval(values: Sequence[float]) -> list[float]:
    """Median and its 95 % bootstrap interval, as [median, low, high]."""
    sample = np.asarray(values)
    draws = np.random.default_rng(0).integers(0, len(sample), (_RESAMPLES, len(sample)))
    low, high = np.percentile(np.median(sample[draws], axis=1), [2.5, 97.5])
    return [float(np.median(sample)), float(low), float(high)]


def summarize(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarize the variants of one model and batch size.

    Parameters
    ----------
    results : mapping of str to mapping
        By variant: `prepare_seconds`, `warm_up`, `steps` and `unseen` (pairs of steps).

    Returns
    -------
    dict of str to dict
        By variant: medians over batches, and `time_ratio` / `peak_ratio` over each base that was
        measured, as [median, low, high] of the batches' own ratios; `full_ratio` is that of time on
        batches without padding, over a step that computes all positions.
    """
    return {name: _summary(result, results) for name, result in results.items()}


def _summary(result: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    steps = result["steps"]
    seconds = _column(steps, "seconds")
    first = [pair[0]["seconds"] for pair in result["unseen"]]
    second = [pair[1]["seconds"] for pair in result["unseen"]]
    bases = {base: results[base]["steps"] for base in _BASES if base in results}
    warm = sum(_column(result["warm_up"], "seconds")) - len(result["warm_up"]) * np.median(seconds)
    return {
        "step_seconds": float(np.median(seconds)),
        "tokens_per_second": sum(_column(steps, "tokens")) / sum(seconds),
        "time_ratio": {base: _ratio(steps, of, "seconds") for base, of in bases.items()},
        "cpu_ratio": {base: _ratio(steps, of, "cpu_seconds") for base, of in bases.items()},
        "peak_bytes": int(max(_column(steps, "activation_peak_bytes"))),
        "peak_ratio": {
            base: _ratio(steps, of, "activation_peak_bytes") for base, of in bases.items()
        },
        # Before the first step and in the first steps beyond what a step takes later.
        "compile_seconds": result["prepare_seconds"] + max(0.0, float(warm)),
        "first_over_second": (
            median_with_interval([a / b for a, b in zip(first, second, strict=True)])
            if first
            else None
        ),
        "full_ratio": _full_ratio(result["unseen"], results),
        "medians_first_over_second": float(np.median(first) / np.median(second)) if first else None,
        "largest_loss_difference": {
            base: max(abs(a["loss"] - b["loss"]) for a, b in zip(steps, of, strict=True))
            for base, of in bases.items()
        },
    }


def _full_ratio(
    unseen: Sequence[Sequence[Mapping[str, Any]]], results: Mapping[str, Mapping[str, Any]]
) -> list[float] | None:
    """Compare the second steps of batches without padding; None where there are none to compare."""
    pairs = zip(unseen, results.get(_PADDED, {}).get("unseen", ()), strict=False)
    full = [
        (ours[1], base[1])
        for ours, base in pairs
        if ours[1]["tokens"] == ours[1]["records"] * ours[1]["length"]
    ]
    return _ratio([a for a, _ in full], [b for _, b in full], "seconds") if full else None


def _column(steps: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [step[key] for step in steps]


def _ratio(
    steps: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], key: str
) -> list[float]:
    return median_with_interval([a[key] / b[key] for a, b in zip(steps, base, strict=True)])


def summary_table(title: str, summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """Lay out a summary for a terminal."""
    headings, *rows = _cells(summary)
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the summaries of several models and batch sizes as one Markdown table."""
    lines: list[str] = []
    for run in runs:
        headings, *rows = _cells(run["summary"])
        if not lines:
            lines = [_line(["Llama, batch", *headings]), _line(["---"] * (len(headings) + 1))]
        lines += [_line([f"{run['size']}, {run['batch']}", *row]) for row in rows]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(summary: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    """Headings, then a row for each variant."""
    bases = [base for base in _BASES if all(base in row["time_ratio"] for row in summary.values())]
    has_full = any(row.get("full_ratio") for row in summary.values())
    yield [
        "variant",
        "step, s",
        "real tokens/s",
        *(f"time / {base}" for base in bases),
        "highest peak, MiB",
        *(f"peak / {base}" for base in bases),
        "compile, s",
        "first / second",
        *(["without padding: time / padded"] if has_full else []),
    ]
    for name, row in summary.items():
        first = row["first_over_second"]
        yield [
            name,
            f"{row['step_seconds']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
            *(_interval(row["time_ratio"][base]) for base in bases),
            f"{row['peak_bytes'] / 2**20:,.0f}",
            *(f"{row['peak_ratio'][base][0]:.3f}" for base in bases),
            f"{row['compile_seconds']:.1f}",
            _interval(first) if first else "-",
            *([_interval(row["full_ratio"])] if has_full else []),
        ]


def _interval(values: Sequence[float]) -> str:
    median, low, high = values
    return f"{median:.3f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "training.json"
    print(markdown(json.loads(source.read_text())["results"]))
