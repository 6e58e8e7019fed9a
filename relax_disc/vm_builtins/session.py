"""The state of a compiled function in a virtual machine: its budget, plans, arena and figures.

>>> session = Session.of(machine, "main")
>>> session.memory_budget = 2**30
>>> session.plan([8, 512]).peak_bytes
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import tvm_ffi

from relax_disc.vm_builtins.plan_metadata import PlanMetadata, Storage
from relax_disc.vm_builtins.planner import PlacedVersion, PlannerGraph, Transfer, plain
from relax_disc.vm_builtins.runtime import function, load
from relax_disc.vm_builtins.state_file import StateFile
from relax_disc.vm_builtins.tier import FileTier, Tier

_RUN, _DRY_RUN, _PROFILE = 0, 1, 2
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ArenaFacts:
    """What a call at one shape under one budget will do."""

    feasible: bool  # whether the call fits; if not, the other figures are of the least plan found
    peak_bytes: int  # resident + escaping + arena + state window + buffer: what a budget bounds
    # highest end offset, and most live bytes inside the arena
    arena_bytes: int
    live_peak_bytes: int
    # what the caller passes, and what is returned
    resident_bytes: int
    escaping_bytes: int
    # most that a library kernel needs beside its arguments, in the arena while it runs
    workspace_bytes: int
    # most that a library takes from malloc in any kernel, beside the arena, a part of `peak_bytes`
    library_bytes: int
    # least peak found feasible, which is not of this plan alone where none is feasible, and a bound
    # below which no plan can be
    least_bytes: int
    lower_bound_bytes: int
    # modelled time, and the same without recomputations
    time_ns: int
    base_time_ns: int
    planning_ns: int  # time that planning took when it was done
    cache_hit: bool  # whether the plan was known
    sequence: tuple[int, ...]  # kernels in the order of their execution
    versions: tuple[PlacedVersion, ...]  # places in the arena
    transfers: tuple[Transfer, ...]  # to and from the tier, in the order of their requests
    tier_bytes: int  # highest end of a slot in the tier
    stall_ns: int  # part of the modelled time in which kernels wait for transfers
    # of the optimizer, in a file, and the most of it that is in memory at once
    offloaded_state_bytes: int
    state_window_bytes: int
    buffer_bytes: int  # that the transfers take beside the arena, a part of `peak_bytes`
    # written to the tier and read back
    offloaded_bytes: int
    reloaded_bytes: int

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Kernels that run again, in order."""
        seen: set[int] = set()
        return tuple(k for k in self.sequence if k in seen or seen.add(k))

    def offloaded(self, metadata: PlanMetadata) -> tuple[str, ...]:
        """Return the kernels that make what is written to the tier, by name, in order."""
        makers = {t: kernel.name for kernel in metadata.kernels for t in kernel.outputs}
        written = (t.version for t in self.transfers if not t.is_read)
        return tuple(makers[self.versions[version].tensor] for version in written)

    @property
    def time_ratio(self) -> float:
        """Modelled time over the modelled time without recomputations."""
        return self.time_ns / self.base_time_ns if self.base_time_ns else 1.0


@dataclass(frozen=True, slots=True)
class CallReport:
    """What the last call did; `peak_bytes` was counted while it ran."""

    dims: tuple[int, ...]  # the shape
    budget_bytes: int | None
    # as promised at entry, and as counted from the memory that kernels touched
    planned_peak_bytes: int
    peak_bytes: int
    # the parts of `peak_bytes`
    arena_bytes: int
    resident_bytes: int
    escaping_bytes: int
    workspace_bytes: int
    held_bytes: int  # what the session keeps until the next call
    recomputations: int  # executions beyond one for each kernel
    # to and from the tier, and time that kernels waited for that
    offloaded_bytes: int
    reloaded_bytes: int
    waited_ns: int
    # as in `ArenaFacts`
    offloaded_state_bytes: int
    state_window_bytes: int
    # time spent planning (0 for a known plan), in all of the entry, in the whole call
    planning_ns: int
    entry_ns: int
    time_ns: int
    cache_hit: bool  # whether the plan was known
    finished: bool  # False if a kernel raised


@dataclass(frozen=True, slots=True)
class SessionCounters:
    """Totals since the session was opened."""

    # calls entered, and those that did not finish
    calls: int
    failures: int
    # plans found and made by calls
    hits: int
    misses: int
    recomputations: int  # executions beyond one for each kernel and call
    # plans in the cache, and those dropped from it
    plans: int
    evicted_plans: int
    held_bytes: int  # size of the arena


class Session:
    """Handle of the run-time state of one function: of a virtual machine, or only to plan.

    ``is_plain``: whether calls just run: none is profiled or a dry run.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.is_plain = True

    @staticmethod
    def to_plan(metadata: PlanMetadata) -> Session:
        """Make a session that plans as the run time will, without a machine to run on."""
        return Session(function("relax_disc.plan_only")(metadata.to_json()))

    @staticmethod
    def of(machine: Any, name: str = "main") -> Session:
        """Open the session of a function.

        ``machine``: the machine; its state is its own. ``name``: name of a function that
        `PlanArena` lowered.
        """
        load()
        return Session(machine[f"{name}__session"]())

    @functools.cached_property
    def metadata(self) -> PlanMetadata:
        """The function's table of kernels."""
        return PlanMetadata.from_json(str(self._ask("metadata")))

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Names of the kernels, by index."""
        return tuple(kernel.name for kernel in self.metadata.kernels)

    @property
    def memory_budget(self) -> int | None:
        """Bytes that `peak_bytes` must stay inside; None is no limit."""
        value = int(self._ask("budget"))
        return None if value < 0 else value

    @memory_budget.setter
    def memory_budget(self, value: int | None) -> None:
        self._ask("set_budget", -1 if value is None else value)

    def set_offer(self, offer: str) -> None:
        """Say what the caller can do besides where a budget does not hold; ends the refusal."""
        self._ask("set_offer", offer)

    def set_tier(self, tier: Tier | None, device: torch.device = _HOST) -> None:
        """Let calls under a budget keep tensors in a tier meanwhile; drops all plans.

        ``device``: what the arena lies on; by default the host, also where nothing will run.
        """
        handle = None if tier is None else tier.handle_on(self.metadata.machine, device)
        self._ask("set_tier", handle)

    def set_state_file(
        self, file: StateFile | None, tier: FileTier | None, given: Sequence[int]
    ) -> None:
        """Say which given tensors lie in a file of the tier's folder; drops all plans."""
        places = tvm_ffi.Shape(tuple(given))
        handles = (None if each is None else each.handle for each in (file, tier))
        self._ask("set_state", *handles, places)

    def plan(self, dims: Sequence[int], budget_bytes: int | None = None) -> ArenaFacts:
        """Make or find the plan of a shape under a budget, running nothing.

        ``dims``: values of `metadata.dims`. ``budget_bytes``: None is no limit.
        """
        shape = tvm_ffi.Shape(tuple(int(dim) for dim in dims))
        return ArenaFacts(
            **plain(self._ask("plan", shape, -1 if budget_bytes is None else budget_bytes))
        )

    def fits(self, dims: Sequence[int], budget_bytes: int) -> bool:
        """Tell whether `plan` would be feasible, without a search for the least budget that is."""
        return self._ask("fits", tvm_ffi.Shape(tuple(int(dim) for dim in dims)), budget_bytes)

    def report(self) -> CallReport:
        """Tell what the last call did."""
        facts = plain(self._ask("report"))
        budget = facts.pop("budget_bytes")
        return CallReport(**facts, budget_bytes=None if budget < 0 else budget)

    def counters(self) -> SessionCounters:
        """Return totals since the session was opened."""
        return SessionCounters(**plain(self._ask("counters")))

    @property
    def arena(self) -> tuple[int, int]:
        """Address and size of the memory that is held between calls."""
        base, size = self._ask("arena")
        return int(base), int(size)

    @property
    def torn(self) -> bool:
        """Whether a call failed after it had written into a tensor of the caller."""
        return bool(self._ask("torn"))

    def clear_torn(self) -> None:
        """Forget that a call failed half-way: the caller's tensors have been loaded again."""
        self._ask("clear_torn")

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Inside, calls plan and count memory of any size, but touch none and run no kernel."""
        with self._in_mode(_DRY_RUN):
            yield

    def measure(self, dims: Sequence[int]) -> CallReport:
        """Count the memory of a call of any size by a dry run, without inputs and results.

        ``dims``: values of `metadata.dims`; the session's budget holds.

        Raises `MemoryBudgetError`: if the shape does not fit.
        """
        nothing = tvm_ffi.convert(lambda *_: None)
        with self.dry_run():
            self.rehearse(dims, [nothing] * len(self.metadata.kernels))
        return self.report()

    def rehearse(self, dims: Sequence[int], kernels: Sequence[Any]) -> float:
        """Run a plan with other functions as kernels, on tensors without memory; return seconds.

        ``dims``: values of `metadata.dims`; the session's budget holds. ``kernels``: one for each
        kernel; they get its arguments.
        """
        enter, before, kernel, leave, reserve = (
            function(f"relax_disc.{name}")
            for name in ("enter", "regenerate_before", "kernel", "leave", "reserve")
        )
        metadata = self.metadata
        values = self.values(dims)
        given: dict[int, Any] = {}
        for view in metadata.views:
            entry = metadata.tensors[view.tensor]
            is_whole = entry.storage is Storage.GIVEN and entry.begin < 0
            if is_whole and entry.given not in given:
                shape = tuple(values[i] for i in view.shape)
                given[entry.given] = reserve(tvm_ffi.Shape(shape), view.dtype)
        tensors = [given[index] for index in sorted(given)]
        start = time.perf_counter()
        frame = enter(self._handle, tvm_ffi.Shape(tuple(dims)), *tensors)
        for index, run in enumerate(kernels):
            before(frame, index)
            kernel(frame, index, run)
        leave(frame)
        return time.perf_counter() - start

    @contextmanager
    def profile(self) -> Iterator[None]:
        """Inside, the time of every kernel is measured; read it with `kernel_times`."""
        with self._in_mode(_PROFILE):
            yield

    @contextmanager
    def _in_mode(self, mode: int) -> Iterator[None]:
        self._ask("set_mode", mode)
        self.is_plain = False
        try:
            yield
        finally:
            self._ask("set_mode", _RUN)
            self.is_plain = True

    def kernel_times(self) -> tuple[tuple[int, int], ...]:
        """Return (executions, total time in ns) of each kernel, as last profiled."""
        runs, times = self._ask("profile")
        return tuple(zip((int(r) for r in runs), (int(t) for t in times), strict=True))

    def planner_graph(self, dims: Sequence[int]) -> PlannerGraph:
        """Return the program as the planner sees it at a shape: what is outside the arena is 0."""
        return PlannerGraph.from_lists(self._ask("graph", tvm_ffi.Shape(tuple(dims))))

    def set_machine(self, flops_per_ns: float, bytes_per_ns: float, overhead_ns: float) -> None:
        """Model every kernel's time by a machine's figures, on any number of threads.

        Drops all plans.

        ``flops_per_ns``, ``bytes_per_ns``, ``overhead_ns``: work = max(flops / flops_per_ns, bytes
        / bytes_per_ns); time = work + overhead_ns.
        """
        self._ask("set_machine", float(flops_per_ns), float(bytes_per_ns), float(overhead_ns))

    def set_kernel_times(
        self, factors: Sequence[float], fixed_ns: Sequence[float], *, threads: int = 0
    ) -> None:
        """Model each kernel's time as work * factor + fixed_ns; by the machine's figures if empty.

        Drops all plans.

        ``factors``, ``fixed_ns``: one for each kernel, or none. ``threads``: number of threads
        that it holds for; 0: any number, in place of all models so far.
        """
        lists = ([float(number) for number in values] for values in (factors, fixed_ns))
        self._ask("set_kernel_times", threads, *lists)

    def values(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Return the values of the metadata's programs at a shape."""
        return tuple(int(value) for value in self._ask("values", tvm_ffi.Shape(tuple(dims))))

    def kernel_work(self, dims: Sequence[int]) -> tuple[tuple[float, ...], float]:
        """Return each kernel's work at a shape by the machine's figures and the overhead, in ns."""
        facts = self._ask("kernel_work", tvm_ffi.Shape(tuple(dims)))
        return tuple(facts["work_ns"]), float(facts["overhead_ns"])

    def check_budget(self, dims: Sequence[int]) -> None:
        """Plan a shape under the present budget, running nothing.

        Raises `MemoryBudgetError`: if the shape does not fit.
        """
        self._ask("check_budget", tvm_ffi.Shape(tuple(int(dim) for dim in dims)))

    def share_arena(self, other: Session) -> None:
        """Use the arena of another session from now on; calls of both then take turns."""
        self._ask("share_arena", other._handle)

    def set_plan_limit(self, plans: int) -> None:
        """Bound the number of plans that are remembered, least recently used first out."""
        self._ask("set_plan_limit", plans)

    def fill_memory(self, byte: int) -> None:
        """Set every byte that is held between calls: a kernel that reads what none wrote shows."""
        self._ask("fill_memory", byte)

    def release(self) -> None:
        """Give back the arena and all plans."""
        self._ask("release")

    def _ask(self, what: str, *args: Any) -> Any:
        return function(f"relax_disc.session.{what}")(self._handle, *args)
