"""Plans within byte budgets: time against DTR's, placements against their bounds, and speed.

Recomputation: time over the time without it, at parts of the recorded peak, on three training steps
that were recorded for Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021; its simulator's
figures stand beside ours), judged by the script that lies with them, and on steps of our own.
Placement: MiniMalloc's problems. Speed: arena plans at a shape seen for the first time, of steps as
`relax_disc.compile` leaves them and of others.

Run ``python -m benchmarks.planning [--quick]``; writes benchmarks/results/planning.json. What lies
in ../shared/graphs takes part where that folder is there.
"""

from __future__ import annotations

import csv
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import tvm_ffi
import typer

from benchmarks.memory.full_size import compile_llama
from benchmarks.memory.planner_peak import planner_peak
from benchmarks.record import write_result
from benchmarks.scheduling.graphs import OWN_GRAPHS, lstm_step, transformer_step
from benchmarks.training.batches import LONGEST
from benchmarks.training.worker import peer_llama
from relax_disc.analysis import TensorGraph, peak_bytes, schedule_ops
from relax_disc.analysis.memory.offsets import plan_offsets
from relax_disc.analysis.memory.rematerialization import (
    Effort,
    plan_rematerialization,
    planner_graph,
)
from relax_disc.errors import MemoryBudgetError
from relax_disc.vm_builtins.planner import PlannerGraph, plan_arena
from relax_disc.vm_builtins.runtime import function

SHARED = Path(__file__).parents[2] / "shared" / "graphs"
PARTS = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
# Figures of DTR's own simulator on its recordings; None: out of memory.
DTR: dict[str, tuple[float | None, ...]] = {
    "resnet32": (1.025, 1.074, 1.107, 1.140, 1.179, 1.332),
    "unet": (1.058, 1.149, 1.159, None, None, None),
    "lstm": (1.027, 1.043, 1.071, 1.159, 1.365, 1.550),
}
CAPACITY = 1048576
ARENA_PARTS = (1.0, 0.75, 0.5, 1 / 3, 0.25)
ALIGNMENT = 64
REPEATS = 5


def recorded() -> Iterator[tuple[str, TensorGraph, Path]]:
    """Yield the recorded steps."""
    for name in DTR:
        path = SHARED / "recorded" / f"{name}.json.gz"
        if path.exists():
            yield name, TensorGraph.load(path), path


def own(quick: bool) -> Iterator[tuple[str, TensorGraph]]:
    """Yield steps made here, scheduled, at one shape."""
    shape = {"batch": 14, "seq": 330}
    graphs: list[tuple[str, TensorGraph, dict[str, int]]] = [
        ("llama 4, fused", OWN_GRAPHS["llama step"](), shape),
        ("transformer 4", transformer_step(4), shape),
        ("lstm 60", lstm_step(), {"batch": 64}),
    ]
    if not quick:
        graphs.append(("transformer 32", transformer_step(32), shape))
    for name, graph, at in graphs:
        numeric = graph.at(at)
        yield name, numeric.reordered(schedule_ops(numeric).order)


def compiled_llama(batch: int, length: int) -> PlannerGraph:
    """Return what the run time plans for a step of Llama S at one shape."""
    torch.manual_seed(0)
    step = compile_llama(peer_llama("S"), batch=64, longest=LONGEST)
    return step.session.planner_graph((batch, length))


def time_ratio(
    graph: TensorGraph, budget: int, effort: Effort, judge: Callable[[tuple[int, ...]], int]
) -> dict[str, Any]:
    """Plan within a budget; `judge` checks the sequence and returns its peak."""
    start = time.perf_counter()
    base = sum(op.time_ns for op in planner_graph(graph).ops)
    try:
        plan = plan_rematerialization(graph, budget, effort=effort)
    except MemoryBudgetError as error:
        seconds = time.perf_counter() - start
        return {
            "least_bytes": error.least_bytes,
            "lower_bound_bytes": error.lower_bound_bytes,
            "seconds": round(seconds, 3),
        }
    seconds = time.perf_counter() - start
    if not judge(plan.sequence) == plan.peak_bytes <= budget:
        raise AssertionError(f"a plan of {plan.peak_bytes} bytes for {budget} is wrong")
    return {"time_ratio": round(plan.time_ns / base, 4), "seconds": round(seconds, 3)}


def replayed(path: Path) -> Callable[[tuple[int, ...]], int]:
    """Return the peak by the script that lies beside the recorded steps."""
    scope: dict[str, Any] = {"__name__": "check"}
    exec(compile((SHARED / "check.py").read_text(), "check.py", "exec"), scope)
    raw = scope["load"](path)
    return lambda sequence: scope["replay"](raw, list(sequence))[0]


def rematerialization(quick: bool) -> list[dict[str, Any]]:
    """Measure and print time ratios at parts of the peak."""
    efforts: tuple[Effort, ...] = ("normal",) if quick else ("normal", "high")
    print(f"{'time over time without':26s}" + "".join(f"{part:>9}" for part in PARTS))
    rows = []
    for name, graph, path in recorded():
        cells = "".join(f"{value or '-':>9}" for value in DTR[name])
        print(f"{name:16s}{'DTR':10s}{cells}")
        rows += [
            ratios(name, graph, int(graph.recorded_peak_bytes or 0), effort, replayed(path))
            for effort in efforts
        ]
    for name, graph in own(quick):
        base = peak_bytes(graph)

        counted = functools.partial(planner_peak, planner_graph(graph))
        rows += [ratios(name, graph, base, effort, counted) for effort in efforts]
    return rows


def ratios(
    name: str,
    graph: TensorGraph,
    peak: int,
    effort: Effort,
    judge: Callable[[tuple[int, ...]], int],
) -> dict[str, Any]:
    """Return one row of time ratios, and print it."""
    cells = [time_ratio(graph, int(peak * part), effort, judge) for part in PARTS]
    texts = [
        f"{cell['time_ratio']:9.4f}"
        if "time_ratio" in cell
        else f">={cell['least_bytes'] / peak:7.4f}"
        for cell in cells
    ]
    slowest = max(cell["seconds"] for cell in cells)
    print(f"{name:16s}{effort:10s}{''.join(texts)}   {slowest:.2f} s at most")
    return {"graph": name, "effort": effort, "peak_bytes": peak, "parts": PARTS, "cells": cells}


def placement(quick: bool) -> list[dict[str, Any]]:
    """Place MiniMalloc's problems within their capacity."""
    rows = []
    for path in sorted((SHARED / "minimalloc").glob("*.1048576.csv")):
        if quick and path.name.startswith("E"):
            continue
        with path.open() as stream:
            problem = [[int(value) for value in row[1:]] for row in list(csv.reader(stream))[1:]]
        lower, upper, size = zip(*problem, strict=True)
        start = time.perf_counter()
        _, height = plan_offsets(lower, upper, size, CAPACITY)
        seconds = time.perf_counter() - start
        fits = "fits" if height <= CAPACITY else f"needs {height}"
        print(f"placement {path.name[0]}: {len(problem)} buffers, {fits}, {seconds:.2f} s")
        rows.append(
            {
                "problem": path.name,
                "height": height,
                "capacity": CAPACITY,
                "seconds": round(seconds, 3),
            }
        )
    return rows


def speed(quick: bool) -> list[dict[str, Any]]:
    """Time the run time's plans: what a call at a new shape waits for."""
    print(f"{'arena plans':26s}{'part':>6s}{'time':>9s}{'arena/live':>12s}{'ms':>9s}")
    rows = []
    graphs = [*own(quick), *((name, graph) for name, graph, _ in recorded() if name != "lstm")]
    steps = [(name, planner_graph(graph)) for name, graph in graphs]
    for name, planner in [("llama 4, compiled", compiled_llama(14, 330)), *steps]:
        whole = plan_arena(planner, None, ALIGNMENT, 0)
        for part in ARENA_PARTS:
            budget = int(whole.arena_bytes * part)
            milliseconds = 1e3 * min(native_seconds(planner, budget) for _ in range(REPEATS))
            plan = plan_arena(planner, budget, ALIGNMENT, 0)
            row: dict[str, Any] = {
                "graph": name,
                "kernels": len(planner.ops),
                "part": round(part, 3),
                "milliseconds": round(milliseconds, 3),
            }
            text = f"{f'{name}, {len(planner.ops)} kernels':26s}{part:6.2f}"
            if plan.feasible:
                row["time_ratio"] = round(plan.time_ns / whole.time_ns, 4)
                row["arena_to_live"] = round(plan.arena_bytes / plan.live_peak_bytes, 4)
                text += f"{row['time_ratio']:9.4f}{row['arena_to_live']:12.4f}"
            else:
                row["least_bytes"] = plan.least_bytes
                text += f"  at least {plan.least_bytes / whole.arena_bytes:.4f}"
            print(f"{text}{milliseconds:9.2f}")
            rows.append(row)
    return rows


def native_seconds(planner: PlannerGraph, budget: int) -> float:
    """Time one plan without the conversion of its arguments to C++ and of its result back."""
    plan, graph = function("relax_disc.plan_arena"), tvm_ffi.convert(planner.lists())
    start = time.perf_counter()
    plan(graph, budget, ALIGNMENT, 0)
    return time.perf_counter() - start


def main(
    quick: Annotated[bool, typer.Option(help="Leave out what takes longest.")] = False,
) -> None:
    """Measure, print the tables, write the figures."""
    results = {
        "rematerialization": rematerialization(quick),
        "placement": placement(quick),
        "speed": speed(quick),
    }
    path = write_result("planning", {"quick": quick}, results)
    print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
