"""The run time in Python: the fall-back without a C++ compiler, and the oracle of its tests.

Registers the same global functions as `src/runtime/api.cc` and gives equal results: plans, figures
and error messages.  Buffers are numpy's; the planner is `planner_twin`.

Limits: CPU; one call at a time enters a session's own arena, as in C++, but nothing is fast; a
session is known by the address of its virtual machine.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from relax_disc.errors import MemoryBudgetError
from relax_disc.vm_builtins.plan_metadata import PlanMetadata, Storage, ViewEntry
from relax_disc.vm_builtins.runtime_twin_memory import (
    Block,
    Memory,
    SharedArena,
    copy,
    tensor_bytes,
)
from relax_disc.vm_builtins.runtime_twin_plan import CostModel, TwinPlan, make_plan, round_up

_RUN, _DRY_RUN, _PROFILE = 0, 1, 2
_COUNTERS = ("calls", "hits", "misses", "failures", "recomputations", "evicted_plans")


class TwinSession:
    """See `runtime_session.h`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.metadata = PlanMetadata.from_json(text)
        self.plans: OrderedDict[tuple[tuple[int, ...], int], TwinPlan] = OrderedDict()
        self.plan_limit = min(256, max(32, 100000 // max(len(self.metadata.kernels), 1)))
        self.budget = -1
        self.mode = _RUN
        self.torn = False
        self.cost = CostModel()
        self.arena = SharedArena()
        self.functions: dict[int, Any] = {}
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.last: dict[str, Any] = _empty_report()
        self.runs = [0] * len(self.metadata.kernels)
        self.times = [0] * len(self.metadata.kernels)
        self.lock = threading.RLock()

    def plan(self, dims: tuple[int, ...], budget: int) -> tuple[TwinPlan, bool]:
        """Find or make a plan."""
        key = (dims, budget)
        with self.lock:
            if key in self.plans:
                self.plans.move_to_end(key)
                return self.plans[key], True
            plan = make_plan(self.metadata, self.cost, dims, budget)
            self.plans[key] = plan
            while len(self.plans) > self.plan_limit:
                self.plans.popitem(last=False)
                self.counters["evicted_plans"] += 1
            return plan, False

    def take_arena(self, plan: TwinPlan) -> tuple[Block, bool]:
        """Return the session's arena, resized, or one of the call's own."""
        if self.mode == _DRY_RUN:
            return Block(plan.arena_bytes, reserved=True), False
        room = self.budget - plan.resident_bytes - plan.escaping_bytes if self.budget >= 0 else None
        shared = self.arena.take(plan.arena_bytes, plan.workspace_bytes, room)
        return (Block(plan.arena_bytes), False) if shared is None else (shared, True)

    @property
    def held(self) -> int:
        """Bytes of arena and workspace."""
        return self.arena.size


class TwinFrame:
    """See `runtime_session.h`."""

    def __init__(self, session: TwinSession, dims: tuple[int, ...], given: list[Any]) -> None:
        self.session = session
        self.given = given
        self.start = time.perf_counter_ns()
        self.finished = self.wrote = self.owns = False
        self.position = self.peak = self.recomputations = self.escaping_bytes = self.entry_ns = 0
        with session.lock:
            session.counters["calls"] += 1
            self.plan, self.hit = session.plan(dims, session.budget)
            session.counters["hits" if self.hit else "misses"] += 1
            if not self.plan.feasible:
                raise _budget_error(session.metadata, self.plan)
            self.mode = session.mode
            self.arena = session.arena
            self.block, self.owns = session.take_arena(self.plan)
        self.offsets: dict[int, int] = {}
        self.next_version = 0
        self.escaping: dict[int, Block] = {}
        for index, entry in enumerate(session.metadata.tensors):
            if entry.storage is Storage.ESCAPING:
                size = round_up(self.plan.values[entry.bytes])
                self.escaping[index] = Block(size, reserved=self.mode == _DRY_RUN)
                self.escaping_bytes += size
        self.entry_ns = time.perf_counter_ns() - self.start

    def view(self, index: int) -> Any:
        """Return the tensor of a view where it is now."""
        entry: ViewEntry = self.session.metadata.views[index]
        tensor = self.session.metadata.tensors[entry.tensor]
        shape = [self.plan.values[program] for program in entry.shape]
        if tensor.storage is Storage.ARENA:
            offset = self.offsets.get(entry.tensor, 0)
            self.peak = max(self.peak, offset + round_up(self.plan.values[tensor.bytes]))
            return self.block.view(offset, shape, entry.dtype)
        if tensor.storage is Storage.ESCAPING:
            return self.escaping[entry.tensor].view(0, shape, entry.dtype)
        given: Any = self.given[tensor.given]
        return given if list(given.shape) == shape else given._create_view(shape, entry.dtype, 0)

    def run(self, function: Any) -> None:
        """Run the kernel at the present position."""
        k = self.plan.sequence[self.position]
        kernel = self.session.metadata.kernels[k]
        versions = self.plan.versions
        while self.next_version < len(versions) and versions[self.next_version][1] == self.position:
            tensor, _, _, offset = versions[self.next_version]
            self.offsets[tensor] = offset
            self.next_version += 1
        self.position += 1
        copies = [(self.view(source), self.view(target)) for source, target in kernel.copies]
        arguments = [self.argument(kind, value) for kind, value in kernel.arguments]
        if self.mode == _DRY_RUN:
            return
        tensors = self.session.metadata.tensors
        self.wrote |= any(tensors[t].storage is Storage.OVERWRITE for t in kernel.outputs)
        for source, target in copies:
            copy(source, target)
        start = time.perf_counter_ns()
        function(*arguments)
        if self.mode == _PROFILE:
            self.session.times[k] += time.perf_counter_ns() - start
            self.session.runs[k] += 1

    def argument(self, kind: str, value: Any) -> Any:
        """Turn an argument of the table into the object that the kernel gets."""
        if kind == "view":
            return self.view(value)
        if kind == "integer":
            return self.plan.values[value]
        if kind == "shape":
            return tvm_ffi.Shape(tuple(self.plan.values[program] for program in value))
        return tvm.DataType(value) if kind == "dtype" else value

    def report(self) -> dict[str, Any]:
        """Tell what the call did."""
        resident = sum(tensor_bytes(tensor) for tensor in self.given)
        return {
            "dims": tvm_ffi.Shape(self.plan.dims),
            "budget_bytes": self.plan.budget,
            "planned_peak_bytes": self.plan.peak_bytes,
            "peak_bytes": self.peak + self.escaping_bytes + resident + self.plan.workspace_bytes,
            "arena_bytes": self.peak,
            "resident_bytes": resident,
            "escaping_bytes": self.escaping_bytes,
            "workspace_bytes": self.plan.workspace_bytes,
            "held_bytes": self.session.held,
            "recomputations": self.recomputations,
            "planning_ns": 0 if self.hit else self.plan.planning_ns,
            "entry_ns": self.entry_ns,
            "time_ns": time.perf_counter_ns() - self.start,
            "cache_hit": self.hit,
            "finished": self.finished,
        }

    def leave(self) -> None:
        """Give the arena back and write the report."""
        session = self.session
        with session.lock:
            if self.owns:
                self.arena.taken, self.owns = False, False
            if not self.finished:
                session.counters["failures"] += 1
                session.torn |= self.wrote
            session.counters["recomputations"] += self.recomputations
            session.last = self.report()

    def __del__(self) -> None:
        if not getattr(self, "finished", True) and hasattr(self, "block"):
            self.leave()
            self.finished = True


def _budget_error(metadata: PlanMetadata, plan: TwinPlan) -> MemoryBudgetError:
    shape = ", ".join(f"{n}={v}" for n, v in zip(metadata.dims, plan.dims, strict=True))
    outside = plan.outside_bytes
    least = outside + plan.least_arena_bytes
    bound = outside + plan.lower_bound_bytes
    return MemoryBudgetError(
        f"{metadata.function} at {shape} does not fit into the memory budget of {plan.budget} "
        f"bytes: the least found feasible is {least} bytes, of which {outside} are parameters, "
        f"inputs, results and workspace; no plan can do with less than {bound} bytes. Raise the "
        "budget or lower the shape.",
        least,
        bound,
    )


def _empty_report() -> dict[str, Any]:
    names = ("planned_peak_bytes", "peak_bytes", "arena_bytes", "resident_bytes")
    names += ("escaping_bytes", "workspace_bytes")
    times = ("held_bytes", "recomputations", "planning_ns", "entry_ns", "time_ns")
    flags = {"cache_hit": False, "finished": False}
    start = {"dims": tvm_ffi.Shape(()), "budget_bytes": -1}
    return {**start, **dict.fromkeys((*names, *times), 0), **flags}


_sessions: dict[tuple[int, str], TwinSession] = {}


def open_session(context: Any, text: str) -> TwinSession:
    """Find or make the session of a table in the virtual machine at an address."""
    return _sessions.setdefault((int(context.value), text), TwinSession(text))


def forget_sessions() -> None:
    """Forget all sessions: of machines that are gone, whose addresses may come back."""
    _sessions.clear()


def enter(session: TwinSession, dims: Sequence[int], *given: Any) -> TwinFrame:
    """Begin a call."""
    return TwinFrame(session, tuple(int(dim) for dim in dims), list(given))


def kernel(frame: TwinFrame, k: int, function: Any) -> None:
    """Run kernel k, which is next in the plan."""
    if frame.plan.first_position[k] != frame.position:
        raise RuntimeError(f"kernel {k} is called where the plan has another one")
    if frame.mode != _DRY_RUN:
        frame.session.functions.setdefault(k, function)
    frame.run(function)


def regenerate_before(frame: TwinFrame, k: int) -> None:
    """Run the recomputations that the plan lists before kernel k."""
    while frame.position < frame.plan.first_position[k]:
        frame.run(frame.session.functions.get(frame.plan.sequence[frame.position]))
        frame.recomputations += 1


def output(frame: TwinFrame, index: int) -> Any:
    """Return a tensor of the flat result."""
    return frame.view(frame.session.metadata.outputs[index])


def leave(frame: TwinFrame) -> None:
    """Finish a call."""
    frame.finished = True
    frame.leave()


def plan_facts(session: TwinSession, dims: Sequence[int], budget: int) -> dict[str, Any]:
    """See `PlanFacts` in `src/runtime/api.cc`."""
    plan, hit = session.plan(tuple(int(dim) for dim in dims), budget)
    outside = plan.outside_bytes
    return {
        "feasible": plan.feasible,
        "peak_bytes": outside + (plan.arena_bytes if plan.feasible else plan.least_arena_bytes),
        "arena_bytes": plan.arena_bytes,
        "live_peak_bytes": plan.live_peak_bytes,
        "resident_bytes": plan.resident_bytes,
        "escaping_bytes": plan.escaping_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "least_bytes": outside + plan.least_arena_bytes,
        "lower_bound_bytes": outside + plan.lower_bound_bytes,
        "time_ns": plan.time_ns,
        "base_time_ns": plan.base_time_ns,
        "planning_ns": plan.planning_ns,
        "cache_hit": hit,
        "sequence": tvm_ffi.Shape(plan.sequence),
        "versions": tvm_ffi.Shape(tuple(x for version in plan.versions for x in version)),
        "values": tvm_ffi.Shape(plan.values),
    }


def counter_facts(session: TwinSession) -> dict[str, int]:
    """Totals since the session was opened."""
    return {**session.counters, "plans": len(session.plans), "held_bytes": session.held}


def set_budget(session: TwinSession, value: int) -> None:
    """Set the budget; what would break it between calls goes at once."""
    session.budget = value
    outside = session.last["resident_bytes"] + session.last["escaping_bytes"]
    if value >= 0:
        session.arena.give_back_above(value - outside)


def set_mode(session: TwinSession, mode: int) -> None:
    """Choose between running, dry runs and profiling."""
    session.mode = mode
    if mode == _PROFILE:
        session.runs = [0] * len(session.runs)
        session.times = [0] * len(session.times)


def set_cost_model(
    session: TwinSession,
    threads: int,
    flops_per_ns: float,
    bytes_per_ns: float,
    overhead_ns: float,
    factors: Sequence[float],
    fixed_ns: Sequence[float],
) -> None:
    """Set what times are modelled by, and drop all plans."""
    del threads  # here is one
    numbers = (flops_per_ns, bytes_per_ns, overhead_ns)
    session.cost = CostModel(*numbers, tuple(factors), tuple(fixed_ns))
    session.plans.clear()


def release(session: TwinSession) -> None:
    """Give back the arena and all plans."""
    session.plans.clear()
    session.arena.give_back_above(0)


def share_arena(session: TwinSession, other: TwinSession) -> None:
    """Use the arena of another session."""
    session.arena = other.arena


def check_budget(session: TwinSession, dims: Sequence[int]) -> None:
    """Raise what a call at this shape would raise for its budget."""
    plan, _ = session.plan(tuple(int(dim) for dim in dims), session.budget)
    if not plan.feasible:
        raise _budget_error(session.metadata, plan)


def reserve(shape: Sequence[int], dtype: str) -> tvm.runtime.Tensor:
    """Make a tensor of address space only."""
    size = int(np.prod(list(shape), dtype=np.int64)) * (tvm.DataType(str(dtype)).bits + 7) // 8
    return Block(size, reserved=True).view(0, list(shape), str(dtype))


def register() -> None:
    """Register all functions of the run time."""
    session: dict[str, Callable[..., Any]] = {
        "metadata": lambda s: s.text,
        "plan": plan_facts,
        "report": lambda s: s.last,
        "counters": counter_facts,
        "profile": lambda s: [tvm_ffi.Shape(s.runs), tvm_ffi.Shape(s.times)],
        "budget": lambda s: s.budget,
        "set_budget": set_budget,
        "set_mode": set_mode,
        "set_cost_model": set_cost_model,
        "set_plan_limit": lambda s, plans: setattr(s, "plan_limit", max(plans, 1)),
        "release": release,
        "fill_memory": lambda s, byte: s.arena.fill(byte),
        "share_arena": share_arena,
        "check_budget": check_budget,
        "torn": lambda s: s.torn,
        "clear_torn": lambda s: setattr(s, "torn", False),
    }
    functions: dict[str, Callable[..., Any]] = {
        "open": open_session,
        "enter": enter,
        "kernel": kernel,
        "regenerate_before": regenerate_before,
        "output": output,
        "leave": leave,
        "copy": copy,
        "reserve": reserve,
        "allocated_bytes": lambda: Memory.allocated,
        "fail_allocation": lambda countdown: setattr(Memory, "countdown", countdown),
        **{f"session.{name}": function for name, function in session.items()},
    }
    for name, function in functions.items():
        tvm_ffi.register_global_func(f"relax_disc.{name}", function, override=True)
