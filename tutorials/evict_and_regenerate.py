"""Evict and regenerate, pass by pass
==================================

Three passes let a plan give tensors up and compute them again.  None of them decides anything:
the program is the same for every shape and budget, and the plan of a call chooses.

    python tutorials/evict_and_regenerate.py
"""  # noqa: D205, D400

from __future__ import annotations

from typing import Any

import torch
import tvm
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
from relax_disc.frontend import capture_step
from relax_disc.pipeline import PipelineOptions, phases
from relax_disc.tir_kernels import cpu_target
from relax_disc.transform import (
    InsertRematerialization,
    LowerRematerialization,
    PlanArena,
    ScheduleOps,
)


class Net(nn.Module):
    """Three layers whose cosines the backward pass reads again, in reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cos(layer(x)).softmax(-1)
        return x.square().mean()


def show(title: str, module: tvm.IRModule, *words: str) -> None:
    """Print the lines of the program that hold one of some words."""
    lines = module["main"].script().splitlines()
    chosen = [line.strip() for line in lines if any(word in line for word in words)]
    print(f"\n== {title}: {len(lines)} lines, of which")
    for line in chosen[:8]:
        print("  ", line if len(line) < 116 else f"{line[:113]}...")


def apply(module: tvm.IRModule, *stages: Any) -> tvm.IRModule:
    """Run passes; their module stays as it was."""
    return tvm.transform.Sequential(stages)(module)


# %%
# Up to here: one Relax function of forward, gradients and update; operators have become kernels.

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
example, shapes = (torch.randn(8, 64),), ({0: Dim("rows", min=1, max=4096)},)
captured = capture_step(model, optimizer, example, dynamic_shapes=shapes)
target = cpu_target()
module = captured.module
with target:
    for name, stages in phases(target, PipelineOptions()).items():
        if name != "memory":
            module = apply(module, *stages)
        else:
            break
    module = apply(module, ScheduleOps())
    show("before", module, "R.call_tir", "R.call_dps_packed")

    # %%
    # `InsertRematerialization` marks the tensors that are read again long after they were read.
    # Both marks are the identity: a module with marks computes what it did without.

    marked = apply(module, InsertRematerialization())
    show("InsertRematerialization", marked, "relax_disc.evict", "relax_disc.regenerate")

    # %%
    # `LowerRematerialization` notes which kernels can be run a second time with the same result.

    lowered = apply(marked, LowerRematerialization())
    kernels = lowered["main"].attrs["relax_disc.recomputable"]
    print("\n== LowerRematerialization: recomputable kernels, by their number:", *kernels)

    # %%
    # `PlanArena` makes straight-line calls of the runtime.  Where something may be computed again
    # stands one call, and the plan of the shape says what runs there: mostly nothing.

    planned = apply(lowered, PlanArena())
    show("PlanArena", planned, "enter", "regenerate_before")

# %%
# The decision is the plan's: nothing without a budget, more under a smaller one; other tensors at
# other shapes.

step = relax_disc.compile(model, optimizer, example, dynamic_shapes=shapes)
print()
for rows in (64, 4096):
    step.memory_budget = None
    free = step.plan(rows=rows)
    assert free.evicted == ()
    print(free)
    step.memory_budget = free.least_bytes
    print(step.plan(rows=rows), "evicts", len(step.plan(rows=rows).evicted))
assert len(step.plan(rows=4096).evicted) > 0
