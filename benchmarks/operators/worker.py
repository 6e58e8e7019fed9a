"""Judge the entries named on standard input, one a line; print a line of JSON for each."""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import torch

from benchmarks.operators.cases import module_samples, modules, operator_samples, operators
from benchmarks.operators.judge import NO_SAMPLE, judge_samples


def judged(kind: str, name: str) -> dict[str, Any]:
    """Judge an entry in this process."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = operator_samples if kind == "operator" else module_samples
            outcome, reason, sample = judge_samples(samples(name))
        except Exception as error:  # the list's own samples
            outcome, reason, sample = NO_SAMPLE, str(error), name
    return {
        "kind": kind,
        "name": name,
        "outcome": outcome,
        "reason": reason,
        "sample": sample if reason else "",
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    for line in sys.stdin:
        kind, name = line.split(maxsplit=1)
        print(json.dumps(judged(kind, name.strip())), file=answers, flush=True)


def entries() -> list[tuple[str, str]]:
    """All entries, as (kind, name)."""
    return [*(("operator", n) for n in operators()), *(("module", n) for n in modules())]


if __name__ == "__main__":
    main()
