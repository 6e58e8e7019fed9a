"""Reorder the bindings of Relax functions so that the peak of live memory falls.

One order for all shapes: see `relax_disc.analysis.schedule_ops`.  In a function of kernels the
optimizer's updates then move to where their gradient is made (`relax_disc.analysis.hoist_sinks`),
which budgets below the peak need.  What library kernels work in on the present number of threads
counts where that lowers the peaks on average over the shapes.  Small moves then lower peaks at
single shapes (`relax_disc.analysis.schedule.settle`).  An update that writes a parameter in
place stays behind the parameter's readers.  A module that has been scheduled comes out again as
good.

On a function of kernels (call_tir form, after fusion) what is measured is what will run: extracted
tensors, in-place places, copies.  On any other function sizes come from types, and runs of pure
bindings between impure ones, control flow and match_cast are scheduled one by one.

Limits: a function with shapes that are known only while it runs is left as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax

from relax_disc.analysis.program.extraction import Extraction, extract
from relax_disc.analysis.program.reader import is_kernel_call
from relax_disc.analysis.program.table import NotPlannableError
from relax_disc.analysis.program.tensor_graph import TensorGraph
from relax_disc.analysis.program.workspace import LibraryWorkspace
from relax_disc.analysis.schedule.bindings import BindingGraph, is_movable
from relax_disc.analysis.schedule.hoist import hoisted_within
from relax_disc.analysis.schedule.joint import Shape
from relax_disc.analysis.schedule.order import (
    Schedule,
    best_schedule,
    points_and_checks,
    schedule_ops,
)
from relax_disc.analysis.schedule.problem import (
    ScheduleProblem,
    at_points,
    peaks_at_points,
    problem_of,
)
from relax_disc.analysis.schedule.settle import settle_peaks
from relax_disc.errors import GraphError
from relax_disc.transform.functions import block_like, copy_module, program_functions, with_blocks

_logger = logging.getLogger(__name__)

# By so much may updates that move early raise the peak of shapes that need far less than others.
_GROWTH, _FAR_BELOW = 1.05, 0.5
# By so much may an order that was found without workspaces exceed the given order's peak somewhere.
_SLACK = 1.01
# What one that was found with them must save on average, as a logarithm.
_LEAST_GAIN = 0.001

Shapes = Mapping[str, int] | Sequence[Mapping[str, int]]


@tvm.transform.module_pass(opt_level=0, name="ScheduleOps")
class ScheduleOps:
    """Reorder the pure bindings of every Relax function.

    Parameters
    ----------
    shapes : mapping, or sequence of mappings, optional
        Shapes to optimise for, by the names of the dims; by default what the function's attributes
        say of their ranges, else a wide range.
    """

    def __init__(self, shapes: Shapes | None = None) -> None:
        self.shapes = shapes

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with its bindings in a better order."""
        del ctx
        result = copy_module(mod)
        for variable, function in program_functions(mod):
            name = variable.name_hint
            try:
                extraction = extract(mod, name) if _is_one_block(function) else None
            except (NotPlannableError, GraphError):
                extraction = None
            try:
                if extraction is not None:
                    changed = self._kernels(mod, variable, extraction)
                else:
                    changed = with_blocks(function, self._blocks(function, name))
            except GraphError as reason:
                _logger.info("%s keeps its order: %s", name, reason)
                continue
            result.update_func(variable, changed)
        return relax.transform.Normalize()(result)

    def _kernels(
        self, mod: tvm.IRModule, variable: tvm.ir.GlobalVar, extraction: Extraction
    ) -> relax.Function:
        """Reorder a block of kernels by the graph of what will run."""
        function, name = mod[variable], variable.name_hint
        (block,) = function.body.blocks
        bindings = list(block.bindings)
        calls = [k for k, binding in enumerate(bindings) if is_kernel_call(binding.value)]
        graph = _ordered_overwrites(extraction)
        points, checked = points_and_checks(graph, self.shapes)
        problem = problem_of(graph, checked)
        best = settle_peaks(problem, _best_order(graph, problem, points, checked, name))
        kernels = [extraction.order[k] for k in best]
        order = [calls[k] for k in kernels if k < len(calls)]
        changed = with_blocks(function, [block_like(block, _in_order(bindings, order))])
        if len(kernels) > len(calls) or any(kernel.copies for kernel in extraction.kernels):
            # Copies have no binding: where they go is known once the order is read again.
            result = copy_module(mod)
            result.update_func(variable, changed)
            after = _with_workspaces(extract(result, name))
            if _exceeds(problem_of(after, checked), problem, best):
                _logger.info("%s keeps its order: copies would raise the peak", name)
                return function
        return changed

    def _blocks(self, function: relax.Function, name: str) -> list[relax.BindingBlock]:
        """Reorder the runs of movable bindings of each block by their types."""
        blocks = []
        used_later = _uses_after(function)
        for block in function.body.blocks:
            bindings: list[relax.Binding] = []
            run: list[relax.Binding] = []
            for binding in block.bindings:
                if is_movable(binding):
                    run.append(binding)
                    continue
                bindings += self._run(function, run, used_later, name)
                bindings.append(binding)
                run = []
            bindings += self._run(function, run, used_later, name)
            blocks.append(block_like(block, bindings))
        return blocks

    def _run(
        self,
        function: relax.Function,
        run: list[relax.Binding],
        used_later: Mapping[relax.Var, int],
        name: str,
    ) -> list[relax.Binding]:
        if len(run) < 2:
            return run
        inside = {binding.var for binding in run}
        uses = {var: 0 for var in inside}
        for binding in run:
            for var in relax.analysis.free_vars(binding.value):
                if var in uses:
                    uses[var] += 1
        escaping = [
            binding.var for binding in run if used_later.get(binding.var, 0) > uses[binding.var]
        ]
        reader = BindingGraph(function, run, escaping)
        schedule = _logged(schedule_ops(reader.graph(), self.shapes), name)
        return _in_order(run, [reader.calls[k] for k in schedule.order])


def _logged(schedule: Schedule, name: str) -> Schedule:
    for point in schedule.points:
        _logger.info(
            "%s at %s: peak %d bytes, was %d, at least %d",
            name, dict(point.shape), point.peak_bytes, point.given_peak_bytes,
            point.lower_bound_bytes,
        )  # fmt: skip
    return schedule


def _is_one_block(function: relax.Function) -> bool:
    return isinstance(function.body, relax.SeqExpr) and len(function.body.blocks) == 1


def _searched(graph: TensorGraph) -> list[TensorGraph]:
    """Return the graphs to look for orders of: with workspaces, and without.

    A search bounds its points' peaks and leaves all else as it comes; where workspaces are small
    the order found without them may need less at other shapes, and under budgets.
    """
    if not any(kernel.workspace_bytes for kernel in graph.kernels):
        return [graph]
    kernels = tuple(replace(kernel, workspace_bytes=0) for kernel in graph.kernels)
    return [graph, replace(graph, kernels=kernels)]


def _best_order(
    graph: TensorGraph,
    problem: ScheduleProblem,
    points: Sequence[Shape],
    checked: Sequence[Shape],
    name: str,
) -> Sequence[int]:
    """Search with and without workspaces, move updates to their gradients, return the better order.

    That without stays unless it needs more on average over the shapes, which count by the square
    root of what they need, or more than the given order somewhere.
    """
    orders = []
    for each in _searched(graph):
        own = problem if each is graph else problem_of(each, checked)
        schedule = _logged(best_schedule(own, points, checked), name)
        orders.append(_hoisted(each, own, schedule))
    if len(orders) == 1:
        return orders[0]
    given = np.array(peaks_at_points(problem, range(problem.ops)))
    whole, plain = (np.array(peaks_at_points(problem, order)) for order in orders)
    if np.any(plain > _SLACK * given):
        return orders[0]
    own, other = (np.maximum(peaks - problem.base, 1) for peaks in (whole, plain))
    weights = np.sqrt(np.minimum(own, other))
    gain = float(np.log(other / own) @ weights / weights.sum())
    return orders[0] if gain > _LEAST_GAIN else orders[1]


def _hoisted(graph: TensorGraph, problem: ScheduleProblem, schedule: Schedule) -> Sequence[int]:
    """Move updates to their gradients, nowhere above the given order's peak."""
    places = [schedule.checked.index(point.shape) for point in schedule.points]
    limits = _limits(schedule)
    given = peaks_at_points(problem, range(problem.ops))
    while True:
        order = hoisted_within(graph, at_points(problem, places), schedule.order, limits)
        peaks = peaks_at_points(problem, order)
        worse = [k for k, (a, b) in enumerate(zip(peaks, given, strict=True)) if a > b]
        if not worse:
            return order
        places.append(worse[0])
        limits.append(given[worse[0]])


def _limits(schedule: Schedule) -> list[int]:
    """Peaks allowed at the points: a little more than now where that is far below the largest.

    There a gradient that is kept for long (of a tied embedding) is most of what is live, and would
    hold every other weight's gradient, with the activations it is made from, to the end.  Nowhere
    is it more than the given order's peak, which is no less than the schedule's.
    """
    largest = max(point.peak_bytes for point in schedule.points)
    return [
        min(point.given_peak_bytes, int(_GROWTH * point.peak_bytes))
        if point.peak_bytes < _FAR_BELOW * largest
        else point.peak_bytes
        for point in schedule.points
    ]


def _exceeds(after: ScheduleProblem, before: ScheduleProblem, order: Sequence[int]) -> bool:
    """Whether a peak is above another problem's, given or reordered as was wanted, at a point."""
    given, wanted = (peaks_at_points(before, each) for each in (range(before.ops), order))
    found = peaks_at_points(after, range(after.ops))
    return any(a > max(b, c) for a, b, c in zip(found, given, wanted, strict=True))


def _ordered_overwrites(extraction: Extraction) -> TensorGraph:
    """Return the graph in which a call_tir_inplace keeps its place behind other readers.

    The extraction would copy; whoever lowers the function next may not.
    """
    graph = _with_workspaces(extraction)
    readers: dict[int, list[int]] = {}
    for index, kernel in enumerate(graph.kernels):
        for tensor in kernel.inputs:
            readers.setdefault(tensor, []).append(index)
    kernels = list(graph.kernels)
    for index, call in enumerate(extraction.kernels):
        for source, _ in call.copies:
            buffer = extraction.table.views[source].buffer
            before = {k for k in readers.get(buffer, ()) if k < index}
            after = tuple(sorted(before | set(kernels[index].after)))
            kernels[index] = replace(kernels[index], after=after)
    return replace(graph, kernels=tuple(kernels))


def _with_workspaces(extraction: Extraction) -> TensorGraph:
    """Return the graph with what library kernels work in, as plans place it."""
    graph = extraction.graph()
    formulas = [kernel.workspace for kernel in extraction.kernels]
    kernels = tuple(
        replace(kernel, workspace_bytes=LibraryWorkspace(*formula)) if formula[0] else kernel
        for kernel, formula in zip(graph.kernels, formulas, strict=True)
    )
    return replace(graph, kernels=kernels)


def _uses_after(function: relax.Function) -> dict[relax.Var, int]:
    """Count in how many bindings, and in the result, each variable is used."""
    uses: dict[relax.Var, int] = {}
    values = [binding.value for block in function.body.blocks for binding in block.bindings]
    for value in (*values, function.body.body):
        for var in relax.analysis.free_vars(value):
            uses[var] = uses.get(var, 0) + 1
    return uses


def _in_order(bindings: list[relax.Binding], order: Sequence[int]) -> list[relax.Binding]:
    """Return the calls in the order given, each free binding just before its first use."""
    defined = {binding.var: k for k, binding in enumerate(bindings)}
    placed = [False] * len(bindings)
    result: list[relax.Binding] = []

    def place(position: int) -> None:
        stack = [position]
        while stack:
            top = stack[-1]
            if placed[top]:
                stack.pop()
                continue
            used = (defined.get(var) for var in relax.analysis.free_vars(bindings[top].value))
            missing = sorted(k for k in used if k is not None and not placed[k])
            if missing:
                stack += missing[::-1]
                continue
            placed[top] = True
            result.append(bindings[stack.pop()])

    for position in order:
        place(position)
    for position in range(len(bindings)):
        place(position)
    return result
