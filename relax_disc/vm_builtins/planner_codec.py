"""Calls of the C++ planners: graphs and plans as byte strings of int64 numbers.

One face over both implementations: C++ where the native library is loaded, else the Python twins,
with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain

import numpy as np

from relax_disc.vm_builtins import offsets_twin, planner_twin
from relax_disc.vm_builtins.planner_twin import ArenaPlan, Program, Version
from relax_disc.vm_builtins.planner_twin_model import PlannerGraph


def plan_rematerialization(graph: PlannerGraph, budget: int, effort: int) -> Program:
    """Find the fastest program within a budget of live bytes."""
    function = _native("relax_disc.plan_rematerialization")
    if function is None:
        return planner_twin.plan_rematerialization(graph, budget, effort)
    feasible, peak, time, least, bound, *sequence = _numbers(
        function(encode_graph(graph), budget, effort)
    )
    return Program(bool(feasible), tuple(sequence), peak, time, least, bound)


def plan_arena(graph: PlannerGraph, budget: int, alignment: int, effort: int) -> ArenaPlan:
    """Find a program and places for its tensors in an arena within a budget."""
    answer = arena_call(graph, budget, alignment, effort)()
    if isinstance(answer, ArenaPlan):
        return answer
    feasible, arena, peak, time, least, bound, count, *rest = _numbers(answer)
    versions = tuple(Version(*rest[at : at + 4]) for at in range(count, len(rest), 4))
    return ArenaPlan(bool(feasible), tuple(rest[:count]), versions, arena, peak, time, least, bound)


def arena_call(
    graph: PlannerGraph, budget: int, alignment: int, effort: int
) -> Callable[[], ArenaPlan | bytes]:
    """Return `plan_arena` with its arguments coded already and its answer not yet decoded."""
    function = _native("relax_disc.plan_arena")
    if function is None:
        return lambda: planner_twin.plan_arena(graph, budget, alignment, effort)
    data = encode_graph(graph)
    return lambda: function(data, budget, alignment, effort)


def plan_offsets(
    lower: Sequence[int], upper: Sequence[int], size: Sequence[int], capacity: int
) -> tuple[list[int], int]:
    """Find offsets for buffers with half-open lifetimes; a negative capacity asks for a low one."""
    function = _native("relax_disc.plan_offsets")
    if function is None:
        return offsets_twin.plan_offsets(lower, upper, size, capacity)
    buffers = _bytes(chain([len(size)], lower, upper, size))
    height, *offsets = _numbers(function(buffers, capacity))
    return offsets, height


def encode_graph(graph: PlannerGraph) -> bytes:
    """Flatten a graph for `src/planner/ffi.cc`."""
    numbers = [len(graph.sizes), len(graph.ops), *graph.sizes, *graph.resident, *graph.is_output]
    for op in graph.ops:
        numbers += (op.time_ns, op.rerun_ns, op.workspace, op.recomputable)
        numbers += (len(op.inputs), *op.inputs, len(op.outputs), *op.outputs)
        numbers += (len(op.inplace), *chain.from_iterable(op.inplace))
    return _bytes(numbers)


@cache
def _native(name: str) -> Callable[..., bytes] | None:
    # The planners need no TVM where they run as Python.
    from relax_disc.vm_builtins import native

    if native.load() is None:
        return None
    import tvm_ffi

    return tvm_ffi.get_global_func(name)


def _bytes(numbers: Sequence[int] | chain[int]) -> bytes:
    return np.fromiter(numbers, dtype=np.int64).tobytes()


def _numbers(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype=np.int64).tolist()
