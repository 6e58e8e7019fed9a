"""The peak of live bytes of a tensor graph as a maximum of polynomials in the dims.

Each step's live bytes are an expression.  Those that are proved to be at most another one, or at
most a weighted mean of two others, over all shapes in range, are left out; what is left is the
peak, exactly, wherever two sizes that are equal are equal as expressions (an in-place pair whose
sizes happen to be equal at some shape only counts as apart).
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from relax_disc.analysis.memory.peak import live_ranges, overlaid_bytes
from relax_disc.analysis.program.tensor_graph import TensorGraph, evaluate_sizes
from relax_disc.analysis.program.workspace import LibraryWorkspace
from relax_disc.analysis.schedule.shapes import check_shapes, sample_shapes
from relax_disc.analysis.symbolic.comparison.compare import at_most
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.errors import GraphError

_PARTS = 16  # weights are multiples of one in so many
_PROOFS = 3  # tried for each step, of either kind


def symbolic_trace(graph: TensorGraph) -> list[SymbolicExpr]:
    """Return the live bytes during each kernel, in the graph's order."""
    sizes = [SymbolicExpr(size) for size in graph.sizes]
    begins: dict[int, SymbolicExpr] = {}
    ends: dict[int, SymbolicExpr] = {}
    dies_at = {}
    for live in live_ranges(graph):
        begins[live.first] = begins.get(live.first, SymbolicExpr()) + sizes[live.tensor]
        ends[live.last_use] = ends.get(live.last_use, SymbolicExpr()) + sizes[live.tensor]
        dies_at[live.tensor] = live.last_use
    keep = frozenset(graph.inputs) | frozenset(graph.outputs)
    now, trace = SymbolicExpr(), []
    for step, kernel in enumerate(graph.kernels):
        now = now + begins.get(step, SymbolicExpr())
        dead = [
            (source, target)
            for source, target in kernel.inplace
            if dies_at.get(source) == step and source not in keep
        ]
        saved = overlaid_bytes(sizes, dead)
        if isinstance(kernel.workspace_bytes, LibraryWorkspace):
            raise GraphError(f"{kernel.name}: the workspace of a library's kernel is no expression")
        trace.append(now + kernel.workspace_bytes - saved)
        now = now - ends.get(step, SymbolicExpr())
    return trace


def symbolic_peak(graph: TensorGraph) -> tuple[SymbolicExpr, ...]:
    """Return expressions whose maximum is the peak of live bytes at every shape in range."""
    resident = SymbolicExpr()
    for tensor in graph.inputs:
        resident = resident + graph.sizes[tensor]
    steps = list(dict.fromkeys([*symbolic_trace(graph), resident]))
    shapes = tuple(
        {
            tuple(s.items()): s for s in (*sample_shapes(graph.dims), *check_shapes(graph.dims))
        }.values()
    )
    values = evaluate_sizes(steps, shapes).astype(float)
    # What is largest somewhere must stay; largest totals first, so that few comparisons suffice.
    largest = sorted({int(k) for k in values.argmax(axis=1)})
    rest = sorted(set(range(len(steps))) - set(largest), key=lambda k: -float(values[:, k].mean()))
    kept = list(largest)
    for candidate in rest:
        below = values[:, candidate]
        above = [k for k in kept if np.all(below <= values[:, k])]
        # Polynomials are compared in microseconds, floor divisions and minima in milliseconds.
        above.sort(key=lambda k: (not steps[k].is_polynomial, -float(values[:, k].mean())))
        if any(at_most(steps[candidate], steps[k], graph.dims) for k in above[:_PROOFS]):
            continue
        if not _below_mixture(graph, candidate, steps, values, largest):
            kept.append(candidate)
    return tuple(steps[k] for k in sorted(kept))


def _below_mixture(
    graph: TensorGraph,
    candidate: int,
    steps: list[SymbolicExpr],
    values: np.ndarray,
    largest: list[int],
) -> bool:
    """Whether a step is proved to be at most a weighted mean, so the maximum, of two others."""
    proofs = 0
    quick_first = sorted(largest, key=lambda k: not steps[k].is_polynomial)
    for first, second in combinations(quick_first, 2):
        for part in range(1, _PARTS):
            mean = part * values[:, first] + (_PARTS - part) * values[:, second]
            if np.all(_PARTS * values[:, candidate] <= mean):
                proofs += 1
                if proofs > _PROOFS:
                    return False
                mixture = part * steps[first] + (_PARTS - part) * steps[second]
                if at_most(_PARTS * steps[candidate], mixture, graph.dims):
                    return True
                break
    return False
