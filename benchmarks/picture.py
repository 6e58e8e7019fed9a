"""The README's picture: memory over a step at three budgets, and peaks next to PyTorch's.

    python -m benchmarks.picture          # measures, writes results/picture.json, draws
    python -m benchmarks.picture --draw   # draws again what is in that file

Llama S as in `benchmarks.training`.  Peaks are counted from outside, in malloc and mmap, one
process for each way; the course of memory over the step is the plan's, which those confirm.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

import relax_disc
from benchmarks.processes import ROOT, started
from benchmarks.record import RESULTS, write_result
from benchmarks.training.batches import LONGEST, make_batch
from benchmarks.training.worker import peer_llama

NAME = "picture"
PICTURE = ROOT / "docs" / "images" / "memory.png"
WAYS = {
    "eager": "eager-fused",
    "torch.compile": "compile-fused",
    "relax_disc": "relax_disc",
    "relax_disc, budget": "relax_disc",
}
COLOURS = dict(zip(WAYS, ("#b8433f", "#e6a04a", "#2f4b7c", "#59a14f"), strict=True))
LENGTHS, BATCHES = (64, 128, 192, 256, 320, 384, 448, 512), (1, 2, 4, 6, 8, 10, 12)
BATCH, LENGTH = 4, 256
BUDGET_MIB, SHARES = 96, (1.0, 0.6, 0.4)
_MIB = 2**20


def courses() -> list[dict[str, Any]]:
    """Plan a step of `BATCH` by `LONGEST` at each share of its own activation memory."""
    model = peer_llama("S")
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=LONGEST)}
    step = relax_disc.compile(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        make_batch([24, 16], seed=0),
        dynamic_shapes={"ids": shape, "labels": shape},
    )
    free = step.plan(batch=BATCH, length=LONGEST)
    found = []
    for share in SHARES:
        if share < 1:
            step.memory_budget = free.state_bytes + int(share * free.activation_peak_bytes)
        plan = step.plan(batch=BATCH, length=LONGEST)
        line = plan.timeline
        live = [sum(row) - plan.state_bytes for row in zip(*line.live_bytes.values(), strict=True)]
        starts = [run.start_ns for run in line.runs]
        found.append(
            {
                "share": share,
                "fits": plan.fits,
                "time_ratio": plan.time_ratio,
                "start_ns": starts,
                "live_bytes": live,
            }
        )
    return found


def peaks(way: str, variant: str, threads: int) -> dict[str, list[dict[str, Any]]]:
    """Measure the peak above parameters and optimizer state at each shape."""
    arguments = ("--variant", variant, "--size", "S", "--threads", str(threads))
    budget: dict[str, Any] = {}
    if variant == "relax_disc":
        limit = {"activation_bytes": BUDGET_MIB * _MIB} if way != variant else {}
        budget = {"budget": limit}
    found: dict[str, list[dict[str, Any]]] = {}
    with started(way, "benchmarks.training.worker", arguments, threads) as worker:
        worker.ask(lengths=[40, 30], seed=0, **budget)
        shapes = {"length": [(BATCH, n) for n in LENGTHS], "batch": [(n, LENGTH) for n in BATCHES]}
        for axis, sizes in shapes.items():
            found[axis] = []
            for batch, length in sizes:
                answer = worker.ask(lengths=[length] * batch, seed=1, **budget)
                point = {"size": length if axis == "length" else batch}
                point |= {"bytes": answer["activation_peak_bytes"]}
                found[axis].append(point | {"fits": answer.get("fits", True)})
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the three panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    over, by_length, by_batch = figure.subplots(1, 3)
    unit = results["courses"][0]["start_ns"][-1]
    for course, colour in zip(results["courses"], ("#2f4b7c", "#59a14f", "#a05195"), strict=True):
        share = course["share"]
        label = "no budget" if share == 1 else f"{share:.0%} of that"
        times = [start / unit for start in course["start_ns"]]
        live = [size / _MIB for size in course["live_bytes"]]
        over.plot(times, live, drawstyle="steps-post", color=colour, label=label, linewidth=1)
    over.set(xlabel="modelled time; 1 is the step without a budget")
    over.set_title(f"memory over one step, batch {BATCH}, length {LONGEST}", fontsize=10)
    for axes, axis, fixed in (
        (by_length, "length", f"batch {BATCH}"),
        (by_batch, "batch", f"length {LENGTH}"),
    ):
        for way, found in results["peaks"].items():
            points = [point for point in found[axis] if point["fits"]]
            label = f"{way} of {BUDGET_MIB} MiB" if "budget" in way else way
            sizes, values = zip(*((p["size"], p["bytes"] / _MIB) for p in points), strict=True)
            axes.plot(sizes, values, marker="o", markersize=3, color=COLOURS[way], label=label)
        axes.set(xlabel=axis)
        axes.set_title(f"peak of a step, {fixed}", fontsize=10)
    for axes in (over, by_length, by_batch):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    over.set_ylabel("MiB above parameters and optimizer state")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if not arguments.draw:
        results: dict[str, Any] = {"courses": courses(), "peaks": {}}
        for way, variant in WAYS.items():
            results["peaks"][way] = peaks(way, variant, arguments.threads)
        settings = {"size": "S", "budget_mib": BUDGET_MIB, "threads": arguments.threads}
        write_result(NAME, settings, results)
    results = json.loads((RESULTS / f"{NAME}.json").read_text())["results"]
    draw(results, PICTURE)


if __name__ == "__main__":
    main()
