"""One order of the kernels for every shape
========================================

A training step is a list of kernels, and many orders of it compute the same.  They differ in how
much memory is alive at once.  This script shows the timeline of a small Llama step before and after
scheduling, what a bound says of every other order, and what is alive at the peak that is left.

    python tutorials/scheduling.py [picture.png]
"""  # noqa: D205, D400

from __future__ import annotations

import sys

import torch
from _llama import Llama, LlamaSizes
from torch.export import Dim

from relax_disc import analyze_memory
from relax_disc.analysis import TensorGraph, live_trace, schedule_ops
from relax_disc.frontend import capture_step
from relax_disc.memory_analysis import step_graph

COLUMNS, ROWS = 72, 8

# %%
# The step as kernels
# -------------------
# Forward pass, gradients and AdamW, lowered and fused, with the sizes of all tensors as expressions
# in the two dims.  Nothing is built.

torch.manual_seed(0)
sizes = LlamaSizes(vocabulary=1024, hidden=128, layers=3, heads=4, feed_forward=344, longest=512)
model = Llama(sizes)
ids = torch.randint(0, 1024, (3, 24))
batch, seq = Dim("batch", min=1, max=16), Dim("seq", min=16, max=512)
captured = capture_step(
    model,
    torch.optim.AdamW(model.parameters()),
    (ids, ids.clone()),
    dynamic_shapes={name: {0: batch, 1: seq} for name in ("ids", "labels")},
)
graph = step_graph(captured, scheduled=False)
print(
    f"{len(graph.kernels)} kernels, {len(graph.sizes)} tensors, dims {[d.name for d in graph.dims]}"
)

# %%
# The timeline as the model was written
# -------------------------------------
# Each column is a stretch of the step; its height is what is alive.  All optimizer updates come
# last, so that at short lengths every gradient is alive at the end of the backward pass.


def timeline(
    graph: TensorGraph, shape: dict[str, int], order: tuple[int, ...] | None = None
) -> None:
    """Print the live bytes over the step as a chart."""
    trace = live_trace(graph.at(shape), order)
    peak, floor = int(trace.max()), int(trace.min())
    stretches = [
        int(trace[k * len(trace) // COLUMNS : (k + 1) * len(trace) // COLUMNS + 1].max())
        for k in range(COLUMNS)
    ]
    print(f"{shape}: peak {peak / 2**20:.2f} MiB at step {int(trace.argmax())}")
    for row in range(ROWS, 0, -1):
        level = floor + (peak - floor) * (row - 0.5) / ROWS
        print(f"{level / 2**20:8.2f} |" + "".join("#" if s >= level else " " for s in stretches))
    print(" " * 9 + "+" + "-" * COLUMNS)


short, long = {"batch": 1, "seq": 16}, {"batch": 16, "seq": 512}
timeline(graph, short)

# %%
# Scheduling
# ----------
# One order is chosen for all shapes: the corners of the declared ranges and the middle are looked
# at, and that it is nowhere worse than the given order is checked on a grid.  The bound is a proof:
# no order at all has a smaller peak at that shape.

schedule = schedule_ops(graph)
timeline(graph, short, schedule.order)
print(f"\n{'shape':28}{'given':>9}{'ours':>9}{'bound':>9}   MiB; optimal: {schedule.is_optimal}")
for point in schedule.points:
    figures = (point.given_peak_bytes, point.peak_bytes, point.lower_bound_bytes)
    dims = ", ".join(f"{name}={size}" for name, size in point.shape.items())
    print(f"{dims:28}" + "".join(f"{figure / 2**20:9.2f}" for figure in figures))
print(f"checked at {len(schedule.checked)} shapes")
for point in schedule.points:
    assert point.lower_bound_bytes <= point.peak_bytes <= point.given_peak_bytes

# %%
# Updates now run as soon as their gradient is there and nobody reads the old value any more.

names = ["update" if "adam" in graph.kernels[k].name else "." for k in schedule.order]
print(
    "updates (u) in the new order: " + "".join("u" if name == "update" else "." for name in names)
)

# %%
# What is alive at the peak
# -------------------------
# Named with the line of the model that made it.  The peak over all shapes is a maximum of a few
# polynomials.

report = analyze_memory(captured, long)
point = report.worst
print(f"\npeak {point.peak_bytes / 2**20:.1f} MiB at {point.peak_kernel} ({point.peak_source})")
for kind, size in sorted(point.bytes_by_kind.items(), key=lambda item: -item[1]):
    print(f"{size / 2**20:9.2f} MiB {kind}")
for tensor in [t for t in point.live_tensors if t.made_by][:5]:
    print(f"{tensor.bytes / 2**20:9.2f} MiB made by {tensor.made_by} {tensor.source}")
print("live bytes are the maximum of:")
for expression in report.symbolic_peak:
    print(f"    {expression}")

# %%
# The same as a picture, where matplotlib is installed.

if len(sys.argv) > 1:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3))
    for label, order in (("as written", None), ("scheduled", schedule.order)):
        axes.plot(live_trace(graph.at(short), order) / 2**20, label=label)
    axes.set_xlabel("kernel")
    axes.set_ylabel("live MiB")
    axes.legend()
    figure.savefig(sys.argv[1])
