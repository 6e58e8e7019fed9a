"""Show the results of `benchmarks.models --speed` on the screen and as docs/models-speed.md."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.models.document import read_results
from benchmarks.models.wide import WIDE

PAGE = Path(__file__).parents[2] / "docs" / "models-speed.md"

_COLUMNS = (
    "model",
    "parameters",
    "threads",
    "shapes",
    "eager ms",
    "step / eager (quartiles)",
    "processor time / eager (quartiles)",
    "peak / eager",
    "compile s",
    "torch.compile: step / eager, s",
)
_INTRODUCTION = """\
# Speed of other models

One training step (loss, gradients, AdamW) of the models of [the table](models.md) at a realistic
width, two or three layers deep, and of networks of timm and diffusers as they are, float32, each
compiled **once** for symbolic batch, lengths, height and width. *Step / eager* is the time of a
step over eager PyTorch's (fused AdamW): quartiles over pairs of measurements taken in turn, two
processes with as many threads each, of which one waits while the other runs. *Processor time* is
that of all threads of the same steps: other work on the machine disturbs it less. *Peak* is what
malloc and mmap held above parameters and optimizer state. Compiling is from scratch, what the first
calls add included. The last column is empty where torch.compile was not timed; of recurrent
layers it makes no graph, but leaves them to eager PyTorch.
"""


_COMPILING = """## Compile time

Processor seconds of one thread from nothing to the end of the first training step at a model's
first shape, less a later step's; empty caches, imports left out. *Graphs* is how many
torch.compile(dynamic=True) made; with none all runs in eager PyTorch. Where it stands with *more
than*, torch.compile was stopped there, not being done.
"""


RECORDED = ("models_speed_epyc", "models_speed")
"""Files of results, one of each kind of processor, that the page shows."""


def page(files: Mapping[str, Mapping[str, Any]], compiling: Mapping[str, Any]) -> str:
    """Write the files of results, of steps (by name) and of compiling, as Markdown."""
    whole = {name for name, row in compiling["results"].items() if _is_left_whole(row)}
    sections = [_measured(name, content["results"], whole) for name, content in files.items()]
    lines = [_INTRODUCTION, *(line for section in sections for line in section)]
    return "\n".join([*lines, *_compiling(compiling["results"])]) + "\n"


def _measured(name: str, results: Sequence[Mapping[str, Any]], whole: Collection[str]) -> list[str]:
    """Write the section of one file of results; rows that lost or failed are in it."""
    processors = ", ".join(dict.fromkeys(r["processor"] for r in results))
    lines = [f"## On {processors}", "", _totals(results), ""]
    lines += [_row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
    lines += [_row(cells) for result in results for cells in _cells(result, whole)]
    lines.append("")
    missing = [e.name for e in WIDE if e.name not in {r["model"] for r in results}]
    if missing:
        lines += [f"Not measured there, {len(missing)}: {', '.join(missing)}.", ""]
    for result in results:
        if result["verdict"] != "measured":
            lines += [f"- **{result['model']}** {result['verdict']}: {result['message']}", ""]
    commits = dict.fromkeys(result["commit"] for result in results)
    busiest = max([0.0, *(r.get("idle_cpu_share", 0.0) for r in results)])
    processes = [p for r in results for p in r.get("processes", {}).values()]
    policies = " or ".join(dict.fromkeys(p["wait_policy"] for p in processes))
    cores = " or ".join(dict.fromkeys(str(len(p["affinity"])) for p in processes))
    option = "" if name == "models_speed" else f" --name {name}"
    lines.append(
        f"Measured by `python -m benchmarks.models --speed{option}` at commits "
        f"{', '.join(commits)}, "
        f"processes that may run on {cores} cores, OMP_WAIT_POLICY {policies}; a process that "
        f"waited took at most {busiest:.2f} of a core. {_other_work(results)} This section is "
        f"made of `benchmarks/results/{name}.json`."
    )
    return [*lines, ""]


def _compiling(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Write the section of compile times; what lost or failed is in it like the rest."""
    rows = {entry.name: results[entry.name] for entry in WIDE if entry.name in results}
    ratios = [row["ratio"] for row in rows.values() if "ratio" in row]
    columns = ("model", "relax_disc s", "torch.compile s", "ratio", "graphs")
    lines = [_COMPILING]
    stopped = sum("at_least" in row["torch.compile"] for row in rows.values())
    if ratios:
        lines[-1] += (
            f"\n{len(ratios)} models compared: median of the ratio "
            f"{statistics.median(ratios):.2f}, largest {max(ratios):.2f}, "
            f"{sum(ratio > 1 for ratio in ratios)} above 1.0. Of {stopped} more torch.compile was "
            "stopped when it had taken longer than we did.\n"
        )
    lines += [_row(columns), _row(["---"] * len(columns))]
    for name, row in rows.items():
        ours, theirs = row["relax_disc"], row["torch.compile"]
        seconds = [_seconds(way) for way in (ours, theirs)]
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        if "at_least" in theirs:
            ratio = f"below {ours['seconds'] / theirs['at_least']:.2f}"
        ratio = "none: all runs in eager" if _is_left_whole(row) else ratio
        lines.append(_row([name, *seconds, ratio, str(theirs.get("graphs", ""))]))
    lines.append("")
    for name, row in rows.items():
        for way in ("relax_disc", "torch.compile"):
            if "failed" in row[way]:
                lines += [f"- **{name}**, {way}: `{row[way]['failed'].strip()}`", ""]
    missing = [entry.name for entry in WIDE if entry.name not in rows]
    if missing:
        lines += [f"Not compared yet, {len(missing)}: {'; '.join(missing)}.", ""]
    commits, processors = (
        ", ".join(dict.fromkeys(row[key] for row in rows.values()))
        for key in ("commit", "processor")
    )
    lines.append(
        f"Measured by `python -m benchmarks.models.compile_time --resume` at commits {commits} on "
        f"{processors}, beside other work. This section is made of "
        "`benchmarks/results/compile_time_models.json`."
    )
    return lines


def _seconds(way: Mapping[str, Any]) -> str:
    if "at_least" in way:
        return f"more than {way['at_least']:.1f}"
    return f"{way['seconds']:.1f}" if "seconds" in way else "fails"


def _is_left_whole(row: Mapping[str, Any]) -> bool:
    """Whether torch.compile made no graph of a model, as of recurrent layers."""
    return row["torch.compile"].get("graphs") == 0


def _other_work(results: Sequence[Mapping[str, Any]]) -> str:
    """Tell how quiet the machine was; rows from before it was counted are said to be busy."""
    shares = {r["model"]: r["other_work"] for r in results if "other_work" in r}
    if not shares:
        return "Other work ran on the machine."
    quiet = sum(share < 0.1 for share in shares.values())
    return (
        f"Other processes took less than a tenth of a core during the turns of {quiet} models; "
        f"during those of the other {len(results) - quiet} more, or it was not counted."
    )


def write_page() -> None:
    """Write docs/models-speed.md from the recorded results."""
    files = {name: read_results(name) for name in RECORDED}
    PAGE.write_text(page(files, read_results("compile_time_models")))


def speed_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table for the screen."""
    table = Table(title=_totals(results))
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if number in (0, 3) else "right")
    for result in results:
        for cells in _cells(result):
            table.add_row(*cells)
    return table


def _totals(results: Sequence[Mapping[str, Any]]) -> str:
    done = [result for result in results if result["verdict"] == "measured"]
    if not done:
        return "None measured."
    ratios = [result["ratio"] for result in done]
    peaks = [result["peak_ratio"] for result in done]
    middles = [[shape["processor_ratio"][1] for shape in r["shapes"]] for r in done]
    processor = [statistics.geometric_mean(each) for each in middles]
    slow, busy, high = (sum(x > 1 for x in values) for values in (ratios, processor, peaks))
    told = (
        f"{len(done)} models: median of step / eager {statistics.median(ratios):.2f}, "
        f"{slow} above 1.0; of processor time / eager {statistics.median(processor):.2f}, {busy} "
        f"above 1.0; of peak / eager {statistics.median(peaks):.2f}, "
        f"{high} above 1.0."
    )
    compiling = [r["compile_seconds"] for r in done if "compile" in r["compile_seconds"]]
    if not compiling:
        return told
    ratios = [seconds["relax_disc"] / seconds["compile"] for seconds in compiling]
    return (
        f"{told} Compile time / torch.compile's, {len(ratios)} models: "
        f"median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}."
    )


def _cells(result: Mapping[str, Any], whole: Collection[str] = ()) -> list[list[str]]:
    """Write a row for each shape; those after the first leave out what they share.

    `whole` are the models that torch.compile leaves to eager PyTorch.
    """
    if result["verdict"] != "measured":
        return [[result["model"], result["verdict"], *[""] * (len(_COLUMNS) - 2)]]
    rows = []
    for shape in result["shapes"]:
        times = [shape["ratio"], shape["processor_ratio"]]
        seconds = result["compile_seconds"]
        peer = "fails" if "peer_failed" in result and not rows else ""
        peer = "no graph: is eager" if result["model"] in whole and not rows else peer
        if "compile_ratio" in shape:
            peer = f"{shape['compile_ratio']:.2f}, {seconds['compile']:.0f}"
        rows.append([
            "" if rows else result["model"],
            "" if rows else f"{result['parameters'] / 1e6:.1f} M",
            "" if rows else str(result["processes"]["relax_disc"]["threads"]),
            ", ".join(f"{dim} {size}" for dim, size in shape["sizes"].items()),
            f"{1e3 * shape['seconds']['eager']:.0f}",
            *(f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in times),
            f"{shape['peak_ratio']:.2f}",
            "" if rows else f"{seconds['relax_disc']:.0f}",
            peer,
        ])  # fmt: skip
    return rows


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
