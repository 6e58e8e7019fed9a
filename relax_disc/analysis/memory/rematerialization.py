"""Run kernels again instead of keeping what they made, so that a program fits a byte budget.

What to keep across the highest peak is a knapsack, which a dynamic program solves; where the other
peaks allow its plan, that is the answer. Else a search goes down a ladder of budgets, evicting at
each peak the tensor that frees most for the time of bringing it back, simulates every change
exactly, and takes back what turns out not to be needed. Both are in
`relax_disc/vm_builtins/src/planner`. First runs keep the graph's order. A larger budget never gives
a slower program, a higher effort never either, and the same question has the same answer always.

Limits: one order; nothing is offloaded, as plans of the run time may do. The result is no proof of
optimality, `lower_bound_bytes` of the error is a proof of what cannot fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from relax_disc.analysis.program.tensor_graph import Kernel, TensorGraph
from relax_disc.bytes_text import format_bytes, parse_bytes
from relax_disc.errors import GraphError, MemoryBudgetError
from relax_disc.vm_builtins import planner
from relax_disc.vm_builtins.planner import PlannerGraph, PlannerOp
from relax_disc.vm_builtins.runtime import function

Effort = Literal["normal", "high"]


@dataclass(frozen=True, slots=True)
class RematerializationPlan:
    """A program within a budget.

    Attributes
    ----------
    sequence : tuple of int
        Kernel indices in the order that they run; a repeat is a recomputation.
    peak_bytes : int
        Most live bytes, graph inputs counted.
    time_ns : int
        Time of all runs.
    """

    sequence: tuple[int, ...]
    peak_bytes: int
    time_ns: int


def plan_rematerialization(
    graph: TensorGraph,
    budget_bytes: int | str,
    *,
    shape: Mapping[str, int] | None = None,
    effort: Effort = "normal",
) -> RematerializationPlan:
    """Find a fast program whose live bytes stay within a budget.

    Parameters
    ----------
    graph : TensorGraph
        The program. A kernel without `time_ns` is taken to last as long as its arithmetic or its
        bytes need on a small machine.
    budget_bytes : int or str
        Most live bytes, graph inputs counted; or text such as ``"8GiB"``.
    shape : mapping of str to int, optional
        A value for each dim, if the graph has any.
    effort : {"normal", "high"}
        ``"normal"`` is what the run time does at a new shape; ``"high"`` takes four times as long.

    Raises
    ------
    MemoryBudgetError
        If no program was found; says the least budget that one was found for, and a bound.
    GraphError
        If the graph has dims and `shape` is missing, or the effort is unknown.
    ShapeRangeError
        If `shape` is outside the graph's dims.
    InputMismatchError
        If the budget is not a number of bytes.
    """
    budget = parse_bytes(budget_bytes, name="budget_bytes")
    if effort not in get_args(Effort):
        raise GraphError(f"unknown effort {effort!r}: choose one of {get_args(Effort)}")
    if graph.dims and shape is None:
        names = ", ".join(dim.name for dim in graph.dims)
        raise GraphError(f"the graph's sizes depend on {names}: give a shape")
    numeric = graph.at(shape) if shape is not None else graph
    program = planner.plan_rematerialization(
        planner_graph(numeric), budget, get_args(Effort).index(effort)
    )
    if not program.feasible:
        at = f" at {dict(shape)}" if shape else ""
        raise MemoryBudgetError(
            f"no program found{at} within {format_bytes(budget)} ({budget} bytes): the least found "
            f"needs {program.least_bytes} bytes, and none can do with less than "
            f"{program.lower_bound_bytes}. Raise the budget or take a smaller shape.",
            least_bytes=program.least_bytes,
            lower_bound_bytes=program.lower_bound_bytes,
        )
    return RematerializationPlan(program.sequence, program.peak_bytes, program.time_ns)


def planner_graph(graph: TensorGraph) -> PlannerGraph:
    """Return a numeric tensor graph as the planners take it."""
    count = len(graph.sizes)
    times = [_time(graph, kernel) for kernel in graph.kernels]
    view_time = [0] * count
    for kernel, time in zip(graph.kernels, times, strict=True):
        for tensor in kernel.views:
            view_time[tensor] += time
    ops = tuple(
        PlannerOp(
            time_ns=time,
            rerun_ns=time + sum(view_time[tensor] for tensor in kernel.outputs),
            workspace=int(kernel.workspace_bytes),  # type: ignore[arg-type]
            inputs=kernel.inputs,
            outputs=kernel.outputs,
            inplace=kernel.inplace,
            recomputable=kernel.recomputable,
        )
        for kernel, time in zip(graph.kernels, times, strict=True)
    )
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    return PlannerGraph(
        sizes=tuple(int(size) for size in graph.sizes),  # type: ignore[arg-type]
        resident=tuple(tensor in inputs for tensor in range(count)),
        is_output=tuple(tensor in outputs for tensor in range(count)),
        ops=ops,
    )


def _time(graph: TensorGraph, kernel: Kernel) -> int:
    if kernel.time_ns is not None:
        return kernel.time_ns
    flops, moved = int(kernel.flops), int(kernel.moved_bytes)  # type: ignore[arg-type]
    if not moved:
        tensors = (*kernel.inputs, *kernel.outputs)
        moved = sum(int(graph.sizes[tensor]) for tensor in tensors)  # type: ignore[arg-type]
    return function("relax_disc.kernel_time_ns")(flops, moved)
