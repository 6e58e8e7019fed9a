"""Show the results of `benchmarks.models` as a table on the screen and as docs/models.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.models.catalogue import ENTRIES
from benchmarks.record import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_COLUMNS = (
    "model",
    "parameters",
    "symbols",
    "shapes",
    "capture s",
    "compile s",
    "verdict",
    "gradient error",
    "over torch's own",
)
_INTRODUCTION = """\
# Models

Every model below was compiled **once** for symbolic sizes, then trained at each of its shapes,
the least and the greatest among them, from that one program. `transformers` models are made from
their configurations with random weights, small (mostly two layers of width 32), in `train()`
mode, with their own losses, `use_cache=False` and dropout set to 0, since what is random cannot
be compared.

At every shape one step is compared with PyTorch's from the same weights. *Gradient error* is the
norm of the difference from float64 over its norm, all gradients together, at the worst shape;
*over torch's own* divides it by the error of PyTorch in float32 against the same reference. A
model **trains** if at every shape its gradient error is at most twice PyTorch's own and at most
2e-6 (models where PyTorch itself errs by more than 1e-6 are marked with * and held to twice
PyTorch's own alone; errors below 2e-7 are rounding), the loss, updated parameters and buffers are
within 2e-6 or twice PyTorch's own error, and the memory used was exactly what was planned.
**Refused** means: by name, before anything ran. **WRONG** is any other result.

Seconds are processor time of one thread; compiling was from scratch, without the cache.
"""


def read_results(name: str = "models") -> dict[str, Any]:
    """Read a file of results.

    Parameters
    ----------
    name : str
        Of the file in `benchmarks/results`.
    """
    return json.loads(result_path(name).read_text())


def result_path(name: str) -> Path:
    """Where the results of that name are kept."""
    return RESULTS / f"{name}.json"


def page(content: Mapping[str, Any]) -> str:
    """Write the results as Markdown.

    Parameters
    ----------
    content : mapping
        A file of results.
    """
    results = content["results"]
    machine = content["machine"]
    lines = [_INTRODUCTION, _totals(results), ""]
    for source in dict.fromkeys(result["source"] for result in results):
        lines += [f"## {source}", "", _row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
        lines += [_row(_cells(r)) for r in results if r["source"] == source]
        lines.append("")
    excuses = [r for r in results if r["verdict"] != "trains"]
    if excuses:
        lines += ["## What does not train", ""]
        lines += [f"- **{r['model']}**: {_reason(r)}" for r in excuses]
        lines.append("")
    missing = {entry.name for entry in ENTRIES} - {r["model"] for r in results}
    if missing:
        names = ", ".join(entry.name for entry in ENTRIES if entry.name in missing)
        lines += [f"In the table's list but not measured yet, {len(missing)}: {names}.", ""]
    commits = dict.fromkeys(result["commit"] for result in results)
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines.append(
        f"Measured by `python -m benchmarks.models` at commits {', '.join(commits)} on "
        f"{content['date'][:10]}: {machine['processor']}, {machine['cores']} cores, one used; "
        f"Python {machine['python']}, {packages}, "
        f"transformers {content['settings']['transformers']}. This page is made of "
        "`benchmarks/results/models.json` by `python -m benchmarks.models --write-docs`."
    )
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Write docs/models.md from the recorded results."""
    PAGE.write_text(page(read_results()))


def summary_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table for the screen."""
    table = Table(title=_totals(results))
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if number in (0, 2, 6) else "right")
    for result in results:
        table.add_row(*_cells(result))
    return table


def _totals(results: Sequence[Mapping[str, Any]]) -> str:
    verdicts = [result["verdict"] for result in results]
    trained = verdicts.count("trains")
    others = [v for v in dict.fromkeys(verdicts) if v != "trains"]
    rest = "".join(f", {verdicts.count(v)} {v}" for v in others)
    return f"{trained} of {len(results)} models train ({100 * trained / len(results):.0f} %){rest}."


def _cells(result: Mapping[str, Any]) -> list[str]:
    trained = "shapes" in result
    mark = "*" if result.get("beyond_float32") else ""
    return [
        result["model"],
        f"{result['parameters']:,}" if "parameters" in result else "",
        ", ".join(result["symbols"]),
        str(len(result["shapes"])) if trained else "",
        f"{result['capture_seconds']:.1f}" if "capture_seconds" in result else "",
        f"{result['compile_seconds']:.1f}" if "compile_seconds" in result else "",
        result["verdict"],
        f"{result['worst_error']:.1e}{mark}" if trained else "",
        f"{result['ratio']:.2f}" if trained else "",
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _reason(result: Mapping[str, Any]) -> str:
    if result["verdict"] == "WRONG":
        wrong = [shape["sizes"] for shape in result["shapes"] if not shape["right"]]
        return f"differs from PyTorch at {wrong}"
    return " ".join(result["message"].split())
