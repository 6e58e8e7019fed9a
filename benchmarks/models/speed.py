"""Time wide models' training steps next to eager PyTorch's.

`python -m benchmarks.models --speed`: every way of taking the step has a process of its own; rounds
alternate between them, each waiting until the other is idle, so that ratios are of steps that were
taken next to each other.  Memory is what malloc and mmap hold above parameters and optimizer state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from benchmarks.models.document import read_results, result_path
from benchmarks.models.entry import Entry
from benchmarks.models.speed_document import PAGE, RECORDED, speed_table, write_page
from benchmarks.models.wide import WIDE
from benchmarks.processes import Worker, WorkerEndedError, machine_cpu_seconds, started
from benchmarks.record import commit, machine, without_folders, write_result
from relax_disc.vm_builtins import native

_WARM_UP = 2
_IDLE_SECONDS = 0.02
"""Threads of OpenMP spin for some milliseconds after a region before they sleep."""
_TURN_SECONDS = 0.2
"""A turn takes steps for about this long, two at least; its fastest counts."""


def measured(
    entry: Entry,
    names: Sequence[str],
    rounds: int,
    threads: int,
    limit_seconds: float,
    autocast: bool = False,
) -> dict[str, Any]:
    """Measure one model; what goes wrong becomes the verdict.

    Returns
    -------
    dict
        For each shape every variant's median step, and the ratios to eager's with their quartiles;
        ``other_work``, what other processes took during the turns, in cores;
        ``peer_failed`` where torch.compile did not get through, which is then left out.
    """
    found: dict[str, Any] = {
        "model": entry.name,
        "source": entry.source,
        "commit": commit(),
        "processor": machine()["processor"],
    }
    try:
        with ExitStack() as stack:
            workers = []
            for name in names:
                arguments = [name, entry.name, str(threads), *(["autocast"] if autocast else [])]
                module = "benchmarks.models.speed_worker"
                # Eager PyTorch compiles nothing that would be timed: it starts beside the next.
                context = started(
                    name,
                    module,
                    arguments,
                    threads,
                    limit_seconds=limit_seconds,
                    wait=name != "eager",
                )
                workers.append(stack.enter_context(context))
            for worker in workers:
                if "refused" in worker.prepared:
                    message = without_folders(worker.prepared["refused"])
                    return {**found, "verdict": "refused", "message": message}
            return {**found, **_measured(workers, entry, rounds)}
    except WorkerEndedError as error:
        if error.worker != "compile":
            message = without_folders(str(error))[:600]
            return {**found, "verdict": "failed", "message": message}
    others = [name for name in names if name != "compile"]
    found = measured(entry, others, rounds, threads, limit_seconds, autocast)
    return {**found, "peer_failed": True}


def _measured(workers: Sequence[Worker], entry: Entry, rounds: int) -> dict[str, Any]:
    raw: dict[tuple[int, ...], dict[str, list[dict[str, Any]]]] = {
        sizes: {worker.name: [] for worker in workers} for sizes in entry.sizes
    }
    memory: dict[tuple[int, ...], dict[str, Any]] = {sizes: {} for sizes in entry.sizes}
    compiling = {worker.name: worker.prepared["prepare_seconds"] for worker in workers}
    repeat: dict[tuple[int, ...], int] = {}
    for sizes in entry.sizes:
        for worker in workers:
            first, *_, last = [worker.ask(sizes=sizes) for _ in range(_WARM_UP + 1)]
            compiling[worker.name] += max(0.0, first["seconds"] - last["seconds"])
            memory[sizes][worker.name] = worker.ask(memory=sizes)
            # The first step of a turn wakes the threads.
            repeat[sizes] = max(2, min(20, int(_TURN_SECONDS / last["seconds"])))
    busy = other = turns = 0.0
    for number in range(rounds):
        for sizes in entry.sizes:
            order = workers if number % 2 else workers[::-1]
            for worker in order:
                time.sleep(_IDLE_SECONDS)
                others = [other for other in workers if other is not worker]
                before, start = [each.cpu_seconds() for each in others], time.perf_counter()
                foreign = machine_cpu_seconds() - sum(each.cpu_seconds() for each in workers)
                raw[sizes][worker.name].append(worker.ask(sizes=sizes, repeat=repeat[sizes]))
                spent = time.perf_counter() - start
                turns += spent
                other += machine_cpu_seconds() - sum(each.cpu_seconds() for each in workers)
                other -= foreign
                after = [each.cpu_seconds() for each in others]
                busy = max([busy, *((b - a) / spent for a, b in zip(before, after, strict=True))])
    accounts = {worker.name: worker.ask() for worker in workers}
    shapes = [_shape(entry, sizes, raw[sizes], memory[sizes]) for sizes in entry.sizes]
    return {
        "verdict": "measured",
        "parameters": accounts["relax_disc"].pop("parameters"),
        "ratio": statistics.geometric_mean(shape["ratio"][1] for shape in shapes),
        "peak_ratio": max(shape["peak_ratio"] for shape in shapes),
        "compile_seconds": {n: compiling[n] for n in compiling if n != "eager"},
        "idle_cpu_share": busy,
        "other_work": max(0.0, other / turns),
        "processes": accounts,
        "shapes": shapes,
    }


def _has(result: Mapping[str, Any] | None, with_compile: bool) -> bool:
    """Whether a model was run; that it failed is a result too, which `--only` takes again."""
    if result is None or result["verdict"] != "measured":
        return result is not None
    peer = "peer_failed" in result or "compile" in result.get("compile_seconds", {})
    return peer or not with_compile


def _shape(
    entry: Entry,
    sizes: tuple[int, ...],
    raw: Mapping[str, Sequence[Mapping[str, Any]]],
    memory: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Summarise the rounds of one shape; ratios are quartiles over pairs of one round."""

    def ratios(of: str, time: str = "seconds") -> list[float]:
        return [a[time] / b[time] for a, b in zip(raw[of], raw["eager"], strict=True)]

    processor = ratios("relax_disc", "cpu_seconds")

    peaks = {name: found["activation_peak_bytes"] for name, found in memory.items()}
    losses = [raw[name][-1]["loss"] for name in ("eager", "relax_disc")]
    return {
        "sizes": dict(zip(entry.ranges, sizes, strict=True)),
        "seconds": {
            name: statistics.median(step["seconds"] for step in steps)
            for name, steps in raw.items()
        },
        "ratio": statistics.quantiles(ratios("relax_disc"), n=4, method="inclusive"),
        "processor_ratio": statistics.quantiles(processor, n=4, method="inclusive"),
        **({"compile_ratio": statistics.median(ratios("compile"))} if "compile" in raw else {}),
        "peak_bytes": peaks,
        "planned_bytes": memory["relax_disc"]["planned_activation_bytes"],
        "peak_ratio": peaks["relax_disc"] / peaks["eager"],
        "losses": losses,
    }


def run(
    only: Sequence[str],
    *,
    with_compile: bool,
    resume: bool,
    rounds: int,
    limit_seconds: float,
    threads: int,
    name: str = "models_speed",
    autocast: bool = False,
) -> None:
    """Measure models; prints a table, writes benchmarks/results/<name>.json as it goes.

    Parameters
    ----------
    only : sequence of str
        Words in the names of models; all models without.
    with_compile : bool
        Measure ``torch.compile(dynamic=True)`` too.
    resume : bool
        Leave out the models that the file of results has, with torch.compile where it is asked.
    rounds : int
        Measurements of each shape.
    limit_seconds : float
        Of one model's processes.
    threads : int
        Of each process.
    name : str
        Of the file of results.
    autocast : bool
        Run the forward passes under autocast to bfloat16.
    """
    console = Console()
    console.width = max(console.width, 150)
    native.load()  # built once per machine: no part of a compilation
    kept = read_results(name)["results"] if result_path(name).exists() else []
    found = {result["model"]: result for result in kept}
    names = ("eager", *(("compile",) if with_compile else ()), "relax_disc")
    chosen = [e for e in WIDE if not only or any(word in e.name.lower() for word in only)]
    settings = {
        "rounds": rounds,
        "optimizer": "AdamW, fused",
        "autocast": autocast,
    }
    measured_now = []
    for entry in chosen:
        if resume and _has(found.get(entry.name), with_compile):
            continue
        console.print(f"{entry.name} ...")
        result = measured(entry, names, rounds, threads, limit_seconds, autocast)
        found[entry.name] = result
        measured_now.append(result)
        write_result(name, settings, [found[e.name] for e in WIDE if e.name in found])
        console.print(speed_table([result]))
    console.print(speed_table(measured_now))
    if name in RECORDED:
        write_page()
        console.print(f"written to {PAGE}")
