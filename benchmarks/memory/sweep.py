"""Train Llama S and M within budgets, next to PyTorch's own ways of saving memory.

Every batch of real lengths goes to torch.compile(dynamic=True) first, whose peak some budgets are a
part of: of its peak on that batch, or of its highest peak over the run, the one number of bytes
that a user would state.  Then it goes, in a random order, to torch.compile with
`activation_memory_budget`, to layer checkpointing, and to the compiled step at each budget.  Each
way lives in a process of its own; the budgets share one, which takes an untimed step before each
timed one and starts it without an arena, so that what malloc counts is that budget's memory alone.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from benchmarks.memory.report import sweep_table
from benchmarks.processes import Worker
from benchmarks.record import RESULTS, write_result
from benchmarks.training.batches import real_batches
from benchmarks.training.measure import started

BASE = "compile"
UNLIMITED = "no budget"
# Part of this shape's own unlimited activation peak, or of torch.compile's peak on this batch, or
# of torch.compile's highest over all batches: one budget for the run.
BUDGETS: dict[str, tuple[str, float]] = {
    UNLIMITED: ("own", 1.0),
    "3/4 of own": ("own", 3 / 4),
    "1/2 of own": ("own", 1 / 2),
    "1/3 of own": ("own", 1 / 3),
    "1/4 of own": ("own", 1 / 4),
    "0.65 of compile": ("compile", 0.65),
    "0.45 of compile": ("compile", 0.45),
    "0.33 of compile": ("compile", 0.33),
    "0.45 of compile's highest": ("highest", 0.45),
    "0.33 of compile's highest": ("highest", 0.33),
}
_WARM_UP = 2


def sweep(
    sizes: Sequence[str],
    batches: Sequence[int],
    *,
    count: int,
    variants: Sequence[str],
    threads: int,
    time_limit: float,
    name: str,
    resume: bool,
    console: Console,
) -> None:
    """Measure all models and batch sizes; write results after every batch.

    Parameters
    ----------
    sizes, batches : sequences
        Models, and records in a batch.
    count : int
        Batches of real lengths.
    variants : sequence of str
        PyTorch's ways, as `benchmarks.training.worker` names them.
    threads : int
        Of every variant.
    time_limit : float
        Minutes after which no further batch is begun.
    name : str
        Of the file of results.
    resume : bool
        Go on where a file of the same settings stops.
    console : rich.console.Console
        Where tables go.
    """
    settings = {
        "sizes": list(sizes),
        "batches": list(batches),
        "count": count,
        "variants": list(variants),
        "threads": threads,
        "budgets": list(BUDGETS),
    }
    runs = _earlier(name, settings) if resume else []
    end = time.monotonic() + 60 * time_limit
    for size in sizes:
        for batch in batches:
            run = next((r for r in runs if (r["size"], r["batch"]) == (size, batch)), None)
            if run is None:
                run = {"size": size, "batch": batch, "rows": []}
                runs.append(run)
            if len(run["rows"]) < count and time.monotonic() < end:
                for row in _measure(size, batch, count, len(run["rows"]), variants, threads, end):
                    run["rows"].append(row)
                    write_result(name, settings, runs)
            if run["rows"]:
                title = f"Llama {size}, batch {batch}, {len(run['rows'])} batches of real lengths"
                console.print(sweep_table(title, run["rows"]))
    console.print(f"written to {RESULTS / name}.json")


def _earlier(name: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    saved = json.loads(path.read_text())
    return saved["results"] if saved["settings"] == settings else []


def _measure(
    size: str,
    batch: int,
    count: int,
    done: int,
    variants: Sequence[str],
    threads: int,
    end: float,
) -> Iterator[dict[str, Any]]:
    """Yield one row per batch: its length and what each way took."""
    lengths = real_batches(batch, count)
    names = [BASE, *(v for v in variants if v != BASE)]
    with ExitStack() as stack:
        others = {n: stack.enter_context(started(n, size, threads)) for n in names}
        ours = stack.enter_context(started("relax_disc", size, threads))
        for variant in others.values():
            for number in range(_WARM_UP):
                variant.ask(lengths=lengths[number % count], seed=number)
        longest = max(lengths, key=max)
        highest = others[BASE].ask(lengths=longest, seed=0)["activation_peak_bytes"]
        for number in range(done, count):
            if time.monotonic() >= end:
                return
            yield _row(number, lengths[number], others, ours, highest)


def _row(
    number: int,
    lengths: list[int],
    others: Mapping[str, Worker],
    ours: Worker,
    highest: int,
) -> dict[str, Any]:
    found = {BASE: others[BASE].ask(lengths=lengths, seed=number)}
    calls = [name for name in (*others, *BUDGETS) if name != BASE]
    for name in random.Random(number).sample(calls, len(calls)):
        if name in others:
            found[name] = others[name].ask(lengths=lengths, seed=number)
        else:
            found[name] = ours.ask(
                lengths=lengths, seed=number, budget=_budget(name, found[BASE], highest)
            )
    return {"number": number, "length": max(lengths), "ways": found}


def _budget(name: str, base: Mapping[str, Any], highest: int) -> dict[str, float]:
    of, part = BUDGETS[name]
    if name == UNLIMITED:
        return {}
    if of == "own":
        return {"own": part}
    whole = highest if of == "highest" else base["activation_peak_bytes"]
    return {"activation_bytes": part * whole}
