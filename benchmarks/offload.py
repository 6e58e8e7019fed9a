"""Recompute or reload: what plans say, and what steps take, of a Llama within half of its memory.

``python -m benchmarks.offload [--folder DIR]``

Each budget runs with a folder at stated speeds, which the transfers keep to, and with the disk as
it is: by recomputation alone, by reloading alone, and by whichever is faster.  Unlimited steps and
budgeted ones take turns; a row tells the modelled and the measured time over the unlimited step's,
the least of each beside the median, since what else runs on a machine only adds.
The step is calibrated first.  The recorded graphs, where they are, are only planned, at 25 and
50 GB/s.  ``--kinds state`` compares Llama M whose optimizer's state lies in the folder with one
that has it in memory, in turns.  ``--kinds least`` runs at the least budgets, with the largest
gradients by rows and without.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from rich.console import Console
from torch.export import Dim

import relax_disc
from benchmarks.record import write_result
from benchmarks.training.batches import make_batch
from benchmarks.training.worker import peer_llama
from relax_disc import FileTier
from relax_disc.analysis import TensorGraph
from relax_disc.analysis.memory.rematerialization import planner_graph
from relax_disc.pipeline import PipelineOptions
from relax_disc.training_step import TrainingStep
from relax_disc.vm_builtins.planner import TierModel, plan_arena
from relax_disc.vm_builtins.session import Session

SHAPE: dict[str, Any] = {"batch": 4, "length": 328}
PARTS = (0.75, 0.5)
KINDS = ("clocked", "steps", "graphs", "state", "least")
LEAST_SLEEP_NS = 1_000_000  # a timer is late by some 0.1 ms
SPEEDS = (1e8, 3e8, 1e9)
GRAPHS = Path(__file__).parents[2] / "shared" / "graphs" / "recorded"
GRAPH_PARTS, GRAPH_SPEEDS, LATENCY_NS = (0.5, 0.4, 0.3), (25.0, 50.0), 10_000


def compiled(size: str = "S", **options: Any) -> tuple[TrainingStep, Any]:
    """Compile and calibrate a Llama; return it with a batch of the shape."""
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=512)}
    model = peer_llama(size)
    step = relax_disc.compile(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        make_batch([24, 16], seed=0),
        dynamic_shapes={"ids": shape, "labels": shape},
        **options,
    )
    batch = make_batch([SHAPE["length"]] * SHAPE["batch"], seed=1)
    step.calibrate(*batch)
    return step, batch


def seconds(step: TrainingStep, batch: Any) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    step(*batch)
    return time.perf_counter() - start


def measured(
    step: TrainingStep, batch: Any, budget: int, tier: FileTier | None, repeats: int
) -> dict[str, Any]:
    """Plan and run a budget with a tier, in turns with the unlimited step."""
    step.offload_to, step.memory_budget = tier, budget
    plan = step.plan(**SHAPE)
    if not plan.fits:
        return {"fits": False, "least_bytes": plan.least_bytes}
    ratios, waits, times, free_times = [], [], [], []
    for repeat in range(repeats + 1):
        step.memory_budget = None
        free = seconds(step, batch)
        step.memory_budget = budget
        mine = seconds(step, batch)
        if repeat:  # the first one of a plan also fills in its lists of arguments
            ratios.append(mine / free)
            times.append(mine)
            free_times.append(free)
            waits.append(step.memory_report().waited_ns / 1e9)
    return {
        "fits": True,
        "modelled": plan.time_ratio,
        "least_times": min(times) / min(free_times),
        "least_s": [min(times), min(free_times)],
        "measured": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4),
        "modelled_stall": plan.stall_ratio,
        "waited_s": statistics.median(waits),
        "again": len(plan.evicted),
        "reloaded_bytes": plan.reloaded_bytes,
        "peak_bytes": step.memory_report().peak_bytes,
    }


def steps(folder: str, repeats: int, parts: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Rows of the step."""
    step, batch = compiled()
    free = step.plan(**SHAPE)
    for part in parts:
        budget = free.state_bytes + int(part * free.activation_peak_bytes)
        yield {"part": part, "way": "recompute", **measured(step, batch, budget, None, repeats)}
        for speed in (*SPEEDS, None):
            paced = speed is not None
            for way, recompute in (("reload", False), ("both", True)):
                tier = FileTier(folder, bytes_per_s=speed, paced=paced, recompute=recompute)
                figures = tier.figures()
                facts = measured(step, batch, budget, tier, repeats)
                speeds = figures.write_bytes_per_s, figures.read_bytes_per_s
                yield {"part": part, "way": way, "paced": paced, "bytes_per_s": speeds, **facts}


def clocked(folder: str, parts: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Run the step's plans with kernels that only sleep, as long as plans take them to.

    So what a plan says of waiting is compared with a run that nothing else on the machine slows.
    """
    step, _ = compiled()
    metadata = step.session.metadata
    session = Session.to_plan(metadata)
    unlimited = step.plan(**SHAPE)
    dims = [unlimited.shape[name] for name in metadata.dims]
    ops = step.session.planner_graph(dims).ops
    times = [max(op.time_ns, LEAST_SLEEP_NS) for op in ops]
    session.set_kernel_times([0.0] * len(times), [float(time) for time in times])
    free = session.plan(dims)
    state = free.peak_bytes - unlimited.activation_peak_bytes
    for part, speed in itertools.product(parts, SPEEDS):
        for way, recompute in (("reload", False), ("both", True)):
            budget = state + int(part * (free.peak_bytes - state))
            session.set_tier(FileTier(folder, bytes_per_s=speed, paced=True, recompute=recompute))
            session.memory_budget = budget
            plan = session.plan(dims, budget)
            sleeps = [tvm_ffi.convert(functools.partial(_sleep, time / 1e9)) for time in times]
            measured_s = [session.rehearse(dims, sleeps) for _ in range(3)]
            yield {
                **{"part": part, "way": way, "bytes_per_s": speed},
                **{"modelled_s": plan.time_ns / 1e9, "measured_s": statistics.median(measured_s)},
                **{"stall_s": plan.stall_ns / 1e9, "again": len(plan.recomputed)},
                "reloaded_bytes": plan.reloaded_bytes,
            }


def _sleep(seconds: float, *_: Any) -> None:
    time.sleep(seconds)


def state(folder: str, repeats: int) -> Iterator[dict[str, Any]]:
    """One row: the optimizer's state in the folder, and in memory."""
    plain, batch = compiled("M")
    kept, _ = compiled("M", offload_to=folder, offload="optimizer")
    figures = kept.offload_to.figures() if kept.offload_to else None
    for step in (plain, kept):
        step(*batch)
    times = [(seconds(plain, batch), seconds(kept, batch)) for _ in range(repeats)]
    ratios = sorted(there / here for here, there in times)
    plans = plain.plan(**SHAPE), kept.plan(**SHAPE)
    report = kept.memory_report()
    yield {
        "peak_bytes": [plan.peak_bytes for plan in plans],
        "measured_peak_bytes": report.peak_bytes,
        "offloaded_state_bytes": report.offloaded_state_bytes,
        "state_window_bytes": report.state_window_bytes,
        "bytes_per_s": (figures.write_bytes_per_s, figures.read_bytes_per_s) if figures else None,
        "modelled_ratio": plans[1].time_ratio,
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds": statistics.median(here for here, _ in times),
    }


def least(folder: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Rows of the least budgets, and the least activations over the unlimited step's."""
    for split in (False, True):
        step, batch = compiled(options=PipelineOptions(split_gradients=split))
        free = step.plan(**SHAPE)
        for way in ("recompute", "both"):
            tier = None if way == "recompute" else FileTier(folder, bytes_per_s=1e9, paced=True)
            step.offload_to, step.memory_budget = tier, 1
            budget = step.plan(**SHAPE).least_bytes
            part = (budget - free.state_bytes) / free.activation_peak_bytes
            facts = measured(step, batch, budget, tier, repeats)
            facts["bit_identical"] = bit_identical(step, batch, budget)
            facts["planned_peak_bytes"] = step.memory_report().planned_peak_bytes
            yield {"by_rows": split, "way": way, "least": part, "budget": budget, **facts}


def bit_identical(step: TrainingStep, batch: Any, budget: int) -> bool:
    """Whether a step in a budget gives what the unlimited one does: loss, parameters, state."""
    found = []
    for limit in (None, budget):
        step.memory_budget = limit
        with step.restored():
            results = [step(*batch).clone()]
            for p in step.model.parameters():
                state = step.optimizer.state[p] if step.optimizer else {}
                results += [
                    p.detach().clone(),
                    *(torch.as_tensor(x).clone() for x in state.values()),
                ]
        found.append(results)
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def graphs() -> Iterator[dict[str, Any]]:
    """Rows of the recorded graphs."""
    for path in sorted(GRAPHS.glob("*.json.gz")):
        graph = planner_graph(TensorGraph.load(path))
        whole = plan_arena(graph, None, 64, 0)
        for part in GRAPH_PARTS:
            budget = int(whole.arena_bytes * part)
            row: dict[str, Any] = {"graph": path.name.split(".")[0], "part": part}
            alone = plan_arena(graph, budget, 64, 0)
            row["recompute"] = alone.time_ns / whole.time_ns - 1 if alone.feasible else None
            for speed in GRAPH_SPEEDS:
                plan = plan_arena(graph, budget, 64, 0, TierModel(speed, speed, LATENCY_NS, 2**14))
                over = plan.time_ns / whole.time_ns - 1 if plan.feasible else None
                row[f"both at {speed:g} GB/s"] = over
            yield row


def main() -> None:
    """Measure, print and write `results/offload.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", type=float, nargs="+", default=PARTS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:3])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    rows: dict[str, Iterator[dict[str, Any]]] = {
        "clocked": clocked(arguments.folder, arguments.parts),
        "steps": steps(arguments.folder, arguments.repeats, arguments.parts),
        "graphs": graphs(),
        "state": state(arguments.folder, arguments.repeats),
        "least": least(arguments.folder, arguments.repeats),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in arguments.kinds:
        for row in rows[kind]:
            console.print(row)
            found.setdefault(kind, []).append(row)
    alone = arguments.kinds[0] if arguments.kinds in (["state"], ["least"]) else ""
    name = f"offload_{alone}" if alone else "offload"
    write_result(name, {**vars(arguments), **SHAPE}, found)


if __name__ == "__main__":
    main()
