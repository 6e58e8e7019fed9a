"""Plans of the Python run time; the twin of `src/runtime/plan.cc`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi

from relax_disc.vm_builtins.plan_metadata import PlanMetadata, Storage, run_program
from relax_disc.vm_builtins.planner_twin import plan_arena
from relax_disc.vm_builtins.planner_twin_model import PlannerGraph, PlannerOp

ALIGNMENT = 64
EFFORT = 0
UNLIMITED = (2**63 - 1) // 4


def round_up(size: int) -> int:
    """Round up to the alignment of CPU memory."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class CostModel:
    """Model of a kernel's time; the defaults are those of `runtime_plan.h`."""

    flops_per_ns: float = 100.0
    bytes_per_ns: float = 10.0
    overhead_ns: float = 3000.0
    factors: tuple[float, ...] = ()
    fixed_ns: tuple[float, ...] = ()

    def time(self, kernel: int, flops: int, moved_bytes: int) -> int:
        """Modelled nanoseconds."""
        factor = self.factors[kernel] if kernel < len(self.factors) else 1.0
        fixed = self.fixed_ns[kernel] if kernel < len(self.fixed_ns) else self.overhead_ns
        return int(self.work(flops, moved_bytes) * factor + fixed) + 1

    def work(self, flops: int, moved_bytes: int) -> float:
        """Nanoseconds of arithmetic or memory traffic, whichever takes longer."""
        return max(flops / self.flops_per_ns, moved_bytes / self.bytes_per_ns)


@dataclass(frozen=True, slots=True)
class TwinPlan:
    """What one shape under one budget runs; see `runtime_plan.h`."""

    dims: tuple[int, ...]
    values: tuple[int, ...]
    budget: int
    feasible: bool
    sequence: tuple[int, ...]
    first_position: tuple[int, ...]
    versions: tuple[tuple[int, int, int, int], ...]
    arena_bytes: int
    live_peak_bytes: int
    time_ns: int
    base_time_ns: int
    least_arena_bytes: int
    lower_bound_bytes: int
    resident_bytes: int
    escaping_bytes: int
    workspace_bytes: int
    planning_ns: int

    @property
    def outside_bytes(self) -> int:
        """What is there beside the arena, whatever is planned."""
        return self.resident_bytes + self.escaping_bytes + self.workspace_bytes

    @property
    def peak_bytes(self) -> int:
        """All memory of the call."""
        return self.outside_bytes + self.arena_bytes


def planner_graph(metadata: PlanMetadata, cost: CostModel, values: Sequence[int]) -> PlannerGraph:
    """The graph that the planner sees: what is outside the arena takes nothing."""
    tensors = metadata.tensors
    given = {t.given: i for i, t in enumerate(tensors) if t.storage is Storage.GIVEN}
    sizes = tuple(round_up(values[t.bytes]) if t.storage is Storage.ARENA else 0 for t in tensors)
    ops = []
    for index, kernel in enumerate(metadata.kernels):
        overwritten = tuple(
            (given[tensors[output].given], output)
            for output in kernel.outputs
            if tensors[output].storage is Storage.OVERWRITE
        )
        ops.append(
            PlannerOp(
                time_ns=cost.time(index, values[kernel.flops], values[kernel.moved_bytes]),
                rerun_ns=-1,
                workspace=0,
                inputs=kernel.inputs,
                outputs=kernel.outputs,
                inplace=(*kernel.inplace, *overwritten),
                recomputable=kernel.recomputable,
            )
        )
    return PlannerGraph(
        sizes=sizes,
        resident=tuple(t.storage is Storage.GIVEN for t in tensors),
        is_output=tuple(t.storage in (Storage.ESCAPING, Storage.OVERWRITE) for t in tensors),
        ops=tuple(ops),
    )


def workspace_bytes(metadata: PlanMetadata, values: Sequence[int]) -> int:
    """Memory that library kernels share beside their arguments, at values of the programs.

    The numpy twins of the kernels take theirs from Python: 0.
    """
    ask = tvm_ffi.get_global_func("relax_disc.cpu.workspace_bytes", allow_missing=True)
    wanted = {
        (formula, tuple(values[number] for number in numbers))
        for formula, numbers in (kernel.workspace for kernel in metadata.kernels)
        if formula
    }
    if ask is None or not wanted:
        return 0
    return round_up(max(ask(formula, tvm_ffi.Shape(numbers)) for formula, numbers in wanted))


def outside_bytes(metadata: PlanMetadata, values: Sequence[int]) -> tuple[int, int, int]:
    """Bytes beside the arena: resident, escaping and workspace."""
    tensors = metadata.tensors
    resident = sum(values[t.bytes] for t in tensors if t.storage is Storage.GIVEN)
    escaping = sum(round_up(values[t.bytes]) for t in tensors if t.storage is Storage.ESCAPING)
    return resident, escaping, workspace_bytes(metadata, values)


def make_plan(
    metadata: PlanMetadata, cost: CostModel, dims: tuple[int, ...], budget: int
) -> TwinPlan:
    """Plan one shape under a budget of all memory (negative: none)."""
    start = time.perf_counter_ns()
    values = tuple(run_program(program, dims) for program in metadata.programs)
    resident, escaping, workspace = outside_bytes(metadata, values)
    room = budget - resident - escaping - workspace if budget >= 0 else UNLIMITED
    graph = planner_graph(metadata, cost, values)
    arena = plan_arena(graph, max(room, 0), ALIGNMENT, EFFORT)
    first: dict[int, int] = {}
    for position, kernel in enumerate(arena.sequence):
        first.setdefault(kernel, position)
    return TwinPlan(
        dims=dims,
        values=values,
        budget=budget,
        feasible=arena.feasible and room >= 0,
        sequence=arena.sequence,
        first_position=tuple(first.get(k, -1) for k in range(len(metadata.kernels))),
        versions=tuple((v.tensor, v.created, v.last_use, v.offset) for v in arena.versions),
        arena_bytes=arena.arena_bytes,
        live_peak_bytes=arena.live_peak_bytes,
        time_ns=arena.time_ns,
        base_time_ns=sum(op.time_ns for op in graph.ops),
        least_arena_bytes=arena.arena_bytes if arena.feasible else arena.least_bytes,
        lower_bound_bytes=arena.lower_bound_bytes,
        resident_bytes=resident,
        escaping_bytes=escaping,
        workspace_bytes=workspace,
        planning_ns=time.perf_counter_ns() - start,
    )
