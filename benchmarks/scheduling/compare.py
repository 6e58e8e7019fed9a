"""Order one graph by every rule; measure the peaks of live memory."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scheduling.graphs import OWN_GRAPHS, dependencies
from benchmarks.scheduling.rules import order_by_rule
from relax_disc.analysis import TensorGraph, schedule_ops
from relax_disc.analysis.schedule.order import Schedule
from relax_disc.analysis.schedule.problem import peaks_at_points, problem_of

RECORDED = Path(__file__).parents[3] / "shared" / "graphs" / "recorded"
RULES = (
    "paper", "inductor_lpmf", "inductor_bfs", "inductor_dfs", "list", "list_backward",
)  # fmt: skip
HEADS = ("paper", "LPMF", "BFS", "DFS", "list", "backward")
SHUFFLES = 3
LLAMA_GRID = tuple(
    {"batch": batch, "seq": seq}
    for batch in (1, 2, 4, 8, 12, 18)
    for seq in (16, 64, 128, 256, 512, 1024, 1896)
)


def graphs(quick: bool) -> Iterator[tuple[str, TensorGraph]]:
    """Yield the graphs by name."""
    for path in sorted(RECORDED.glob("*.json.gz")):
        yield path.name.split(".")[0], TensorGraph.load(path)
    for name, make in OWN_GRAPHS.items():
        if not (quick and name.startswith(("irregular", "transformer 24"))):
            yield name, make()


def shuffled(graph: TensorGraph, seed: int) -> TensorGraph:
    """Return the program in a random valid order."""
    rng = random.Random(seed)
    left, followers = dependencies(graph)
    ready = [index for index, count in enumerate(left) if count == 0]
    order = []
    while ready:
        index = ready.pop(rng.randrange(len(ready)))
        order.append(index)
        for other in followers[index]:
            left[other] -= 1
            if left[other] == 0:
                ready.append(other)
    return graph.reordered(order)


def timed(graph: TensorGraph, shapes: Any = None) -> tuple[Schedule, float]:
    """Return our schedule and the seconds that it took."""
    start = time.perf_counter()
    schedule = schedule_ops(graph, shapes)
    return schedule, time.perf_counter() - start


def measure(name: str, graph: TensorGraph) -> list[dict[str, Any]]:
    """Return one row for each shape of a graph."""
    ours, seconds = timed(graph)
    shapes = [point.shape for point in ours.points]
    problem = problem_of(graph, shapes)
    given = peaks_at_points(problem, range(problem.ops))
    peaks = {rule: peaks_at_points(problem, order_by_rule(graph, shapes, rule)) for rule in RULES}
    rows = [
        {
            "graph": name,
            "kernels": len(graph.kernels),
            "shape": dict(shape),
            "given_bytes": given[k],
            **{rule: peaks[rule][k] for rule in RULES},
            "ours": point.peak_bytes,
            "bound": point.lower_bound_bytes,
            "seconds": round(seconds, 3),
        }
        for k, (shape, point) in enumerate(zip(shapes, ours.points, strict=True))
    ]
    if not graph.dims:
        starts = [timed(shuffled(graph, seed)) for seed in range(SHUFFLES)]
        rows[0]["from_shuffled"] = [schedule.peak_bytes for schedule, _ in starts]
        rows[0]["seconds"] = round(max(seconds, *(took for _, took in starts)), 3)
    return rows


def grid_check(graph: TensorGraph) -> dict[str, Any]:
    """Compare one order for all shapes with the best for each, over the grid of the Llama step."""
    ours = schedule_ops(graph)
    problem = problem_of(graph, LLAMA_GRID)
    peaks = peaks_at_points(problem, ours.order)
    given = peaks_at_points(problem, range(problem.ops))
    alone = [schedule_ops(graph, shape) for shape in LLAMA_GRID]
    return {
        "shapes": len(LLAMA_GRID),
        "worst_to_alone": max(p / a.peak_bytes for p, a in zip(peaks, alone, strict=True)),
        "worst_alone_to_bound": max(a.peak_bytes / a.lower_bound_bytes for a in alone),
        "worst_to_given": max(p / g for p, g in zip(peaks, given, strict=True)),
    }


def print_row(row: Mapping[str, Any]) -> None:
    """Print one row: the given order's peak, and every other as a multiple of it."""
    shape = " ".join(f"{key}={value}" for key, value in row["shape"].items()) or "-"
    base = row["given_bytes"]
    cells = [row[key] / base for key in (*RULES, "ours", "bound")]
    print(
        f"{row['graph']:15s}{row['kernels']:6d}  {shape:21s}{base / 2**20:10.1f}"
        + "".join(f"{cell:9.4f}" for cell in cells)
        + f"{row['seconds']:8.2f}"
        + "".join(f" {peak / base:.4f}" for peak in row.get("from_shuffled", ()))
    )


def capture_llama() -> TensorGraph:
    """Compile the 4-layer Llama step up to kernels, and return its graph in program order."""
    import torch
    import tvm
    from torch.export import Dim

    from relax_disc import pipeline
    from relax_disc.analysis.program.extraction import extract
    from relax_disc.frontend import capture_step
    from relax_disc.tir_kernels.target import cpu_target
    from tutorials._llama import Llama, LlamaSizes

    torch.manual_seed(0)
    sizes = LlamaSizes(
        vocabulary=1024, hidden=256, layers=4, heads=8, feed_forward=688, longest=2048
    )
    model = Llama(sizes)
    shape = {0: Dim("batch", min=1, max=18), 1: Dim("seq", min=16, max=1896)}
    ids = torch.randint(0, 1024, (3, 24))
    captured = capture_step(
        model,
        torch.optim.AdamW(model.parameters()),
        (ids, ids.clone()),
        dynamic_shapes={"ids": shape, "labels": shape},
    )
    target, options = cpu_target(), pipeline.PipelineOptions()
    with target:
        lowered = tvm.transform.Sequential(
            [
                *pipeline.simplify_passes(),
                *pipeline.library_passes(target, options),
                *pipeline.legalize_passes(target, options),
                *pipeline.alias_passes(),
                *pipeline.kernel_passes(target),
            ]
        )(captured.module)
    graph = extract(lowered, "main").graph()
    kernels = tuple(replace(kernel, source="") for kernel in graph.kernels)
    return replace(graph, kernels=kernels, origin="Llama step, 4 layers of 256, AdamW, fused")
