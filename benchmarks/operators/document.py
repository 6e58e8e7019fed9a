"""Print docs/operators.md: what the code says of operators, and what became of PyTorch's lists."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.operators import tables
from benchmarks.operators.judge import CRASH, NO_SAMPLE, RANDOM, REFUSED, RIGHT, STATIC, WRONG
from benchmarks.record import RESULTS

RESULT = RESULTS / "operators.json"

_INTRODUCTION = """\
## PyTorch's own lists

Every differentiable operator of `torch.testing`'s `op_db` and every module of its `module_db`, in
float32, trained for a step of SGD and compared with eager PyTorch: results, parameters and buffers.
Each entry is judged by its first two samples in which an axis can vary, at two sizes from one
compilation; a factor and an addend before each input make gradients of all of them. *Fixed size*:
in no sample can an axis vary. *Random*: compiled and run, but two calls of PyTorch differ too.
Written by `python -m benchmarks.operators`; the file of results has the commit of each."""


def page() -> str:
    """Write the whole page as Markdown."""
    return f"{tables.page()}\n{_lists()}"


def _lists() -> str:
    if not RESULT.exists():
        return ""
    results = json.loads(RESULT.read_text())["results"]
    outcomes = [RIGHT, STATIC, RANDOM, REFUSED, NO_SAMPLE, WRONG, CRASH]
    lines = [f"| list | entries | {' | '.join(outcomes)} |", "|---" * (len(outcomes) + 2) + "|"]
    for kind, title in (("operator", "`op_db`"), ("module", "`module_db`")):
        counts = Counter(r["outcome"] for r in results if r["kind"] == kind)
        cells = " | ".join(str(counts[outcome]) for outcome in outcomes)
        lines.append(f"| {title} | {counts.total()} | {cells} |")
    parts = [_INTRODUCTION, "\n".join(lines)]
    parts += [_details(outcome, results) for outcome in outcomes[1:]]
    return "\n\n".join(part for part in parts if part) + "\n"


def _details(outcome: str, results: Sequence[dict[str, Any]]) -> str:
    found = [r for r in results if r["outcome"] == outcome]
    if not found:
        return ""
    if outcome in (STATIC, RANDOM, NO_SAMPLE):
        return f"{outcome.capitalize()}: " + ", ".join(f"`{r['name']}`" for r in found) + "."
    rows = [f"| `{r['name']}` | {_cell(r['reason'])} |" for r in found]
    return "\n".join([f"| {outcome} | why |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(page(), end="")
