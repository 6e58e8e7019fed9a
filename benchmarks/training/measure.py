"""Start one process for each way of training, and give every batch to all of them in turn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks import processes
from benchmarks.processes import ROOT, Worker
from benchmarks.training.batches import LONGEST, unseen_lengths


@contextmanager
def started(name: str, size: str, threads: int, tree: Path = ROOT) -> Iterator[Worker]:
    """Start the worker of one way of training."""
    arguments = ["--variant", name, "--size", size, "--threads", str(threads)]
    with processes.started(name, "benchmarks.training.worker", arguments, threads, tree) as worker:
        yield worker


def measure(
    variants: Sequence[Worker],
    batches: Sequence[list[int]],
    unseen: int,
    progress: Progress,
    warm_up: int = 2,
) -> dict[str, dict[str, Any]]:
    """Give every batch to every variant in turn, then lengths that none has met, twice each.

    ``warm_up``: how many of the batches each takes once before.
    """
    results: dict[str, dict[str, Any]] = {
        v.name: {**v.prepared, "warm_up": [], "steps": [], "unseen": []} for v in variants
    }
    for variant in variants:
        for number, lengths in enumerate(batches[:warm_up]):
            results[variant.name]["warm_up"].append(variant.ask(lengths=lengths, seed=number))
    for number, lengths in progress.track(list(enumerate(batches)), description="real batches"):
        for variant in _shuffled(variants, number):
            results[variant.name]["steps"].append(variant.ask(lengths=lengths, seed=number))
    fresh = unseen_lengths({max(lengths) for lengths in batches}, unseen)
    for number, length in progress.track(list(enumerate(fresh)), description="unseen lengths"):
        for variant in _shuffled(variants, number):
            # Every second one is padded: the number of real positions is new, too.
            others = batches[number % len(batches)][1:] if number % 2 else [length] * LONGEST
            lengths = [length, *(min(n, length) for n in others)][: len(batches[0])]
            request = {"lengths": lengths, "seed": 10_000 + number}
            pair = [variant.ask(**request) for _ in range(2)]
            results[variant.name]["unseen"].append(pair)
    return results


def _shuffled(variants: Sequence[Worker], seed: int) -> list[Worker]:
    return random.Random(seed).sample(variants, len(variants))
