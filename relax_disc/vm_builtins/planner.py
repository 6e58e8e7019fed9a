"""The C++ planners over plain graphs: which kernels run again, and where tensors lie.

Lists of numbers cross to C++, maps of named numbers come back.  Plans of compiled functions are
made by `Session`, from their table of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from relax_disc.vm_builtins.runtime import function


@dataclass(frozen=True, slots=True)
class PlannerOp:
    """One kernel of a program; see `src/planner/planner.h` for the meaning of in-place pairs."""

    # time of the first run, and of running it again (-1: the same)
    time_ns: int
    rerun_ns: int
    workspace: int  # scratch bytes that are live while it runs
    # tensors
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    # pairs of an input and the output that may, or for resident inputs does, take its place
    inplace: tuple[tuple[int, int], ...] = ()
    recomputable: bool = True  # whether it may run again


@dataclass(frozen=True, slots=True)
class PlannerGraph:
    """A program in execution order over sized tensors."""

    sizes: tuple[int, ...]  # bytes per tensor
    # whether a tensor lies outside the arena at all times, and must be there at the end
    resident: tuple[bool, ...]
    is_output: tuple[bool, ...]
    ops: tuple[PlannerOp, ...]  # the kernels

    def lists(self) -> list[Any]:
        """Return it as C++ reads it."""
        ops = []
        for op in self.ops:
            tensors = op.inputs, op.outputs, op.inplace
            ops.append((op.time_ns, op.rerun_ns, op.workspace, op.recomputable, *tensors))
        return [self.sizes, self.resident, self.is_output, ops]

    @staticmethod
    def from_lists(parts: Sequence[Any]) -> PlannerGraph:
        """Undo `lists`."""
        sizes, resident, is_output = (tuple(map(int, part)) for part in parts[:3])
        ops = []
        for time_ns, rerun_ns, workspace, recomputable, inputs, outputs, pairs in parts[3]:
            tensors = tuple(inputs), tuple(outputs), tuple(tuple(pair) for pair in pairs)
            ops.append(PlannerOp(time_ns, rerun_ns, workspace, *tensors, bool(recomputable)))
        return PlannerGraph(
            sizes, tuple(map(bool, resident)), tuple(map(bool, is_output)), tuple(ops)
        )


@dataclass(frozen=True, slots=True)
class Program:
    """A sequence of kernels within a budget of live bytes."""

    feasible: bool  # whether one was found; if not, the sequence is empty
    sequence: tuple[int, ...]  # kernel indices; a repeat is a recomputation
    # most live bytes, resident tensors counted, and time
    peak_bytes: int
    time_ns: int
    least_bytes: int  # least budget found feasible, where infeasible; else 0
    lower_bound_bytes: int  # no order-preserving program needs less


@dataclass(frozen=True, slots=True)
class PlacedVersion:
    """One life of a tensor in the arena; positions in the sequence are inclusive."""

    tensor: int  # index in the program; the workspace of kernel k is -1 - k
    # first and last position
    created: int
    last_use: int
    offset: int  # bytes from the arena's start


@dataclass(frozen=True, slots=True)
class TierModel:
    """What plans know of a place that tensors are written to and read back from.

    Transfers run beside kernels, one at a time in the order of their requests.
    """

    # speeds, and time of each transfer beside its bytes
    write_bytes_per_ns: float
    read_bytes_per_ns: float
    latency_ns: int = 0
    least_bytes: int = 1  # smaller tensors stay
    queue: int = 64  # requests that may wait; the next one waits until one of them is done
    recompute: bool = True  # whether kernels may run again, too
    buffer_bytes: int = 0  # that transfers need beside the arena, in the same budget

    def time_ns(self, size: int, is_read: bool) -> int:
        """Time of a transfer of so many bytes."""
        speed = self.read_bytes_per_ns if is_read else self.write_bytes_per_ns
        return self.latency_ns + int(size / speed)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One version on its way out, from the end of position `start`, or back, from its beginning.

    It is done before position `wait` begins; meanwhile its memory is its own.
    """

    version: int  # index in the plan's versions
    is_read: bool
    start: int
    wait: int
    slot: int  # offset in the tier, in bytes
    # modelled, from the start of the program
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """A sequence of kernels and the place of every tensor; resident tensors are not counted."""

    feasible: bool  # whether one was found; if not, `sequence` and `versions` are empty
    sequence: tuple[int, ...]  # kernel indices; a repeat is a recomputation
    versions: tuple[PlacedVersion, ...]  # places, by `created`
    transfers: tuple[Transfer, ...]  # in the order of their requests
    tier_bytes: int  # highest end of a slot in the tier
    stall_ns: int  # part of the time in which kernels wait for transfers
    # highest end offset; most live bytes
    arena_bytes: int
    live_peak_bytes: int
    time_ns: int  # modelled time
    # least arena found feasible where infeasible, else 0; no plan can do with less than the bound
    least_bytes: int
    lower_bound_bytes: int


def plan_rematerialization(graph: PlannerGraph, budget: int | None, effort: int) -> Program:
    """Find the fastest program within a budget of live bytes; None is no limit."""
    facts = function("relax_disc.plan_rematerialization")(graph.lists(), _limit(budget), effort)
    return Program(**plain(facts))


def plan_arena(
    graph: PlannerGraph,
    budget: int | None,
    alignment: int,
    effort: int,
    tier: TierModel | None = None,
) -> ArenaPlan:
    """Find a program and places for its tensors in an arena within a budget; None is no limit.

    With a tier, what is not kept is computed again or read back.
    """
    figures = () if tier is None else astuple(tier)
    facts = function("relax_disc.plan_arena")(
        graph.lists(), _limit(budget), alignment, effort, figures
    )
    return ArenaPlan(**plain(facts))


def plan_remainder(graph: PlannerGraph, plan: ArenaPlan, position: int) -> ArenaPlan:
    """Leave out what a plan computes again behind a position, as far as it fits now.

    ``graph``: sizes as they are known at the position, in whole units of the alignment and none
    larger than the plan's. ``plan``: without transfers. ``position``: the last kernel that has
    run.
    """
    versions = [astuple(version) for version in plan.versions]
    facts = plain(
        function("relax_disc.plan_remainder")(
            graph.lists(), plan.sequence, versions, plan.arena_bytes, position
        )
    )
    return replace(plan, **facts)


def plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the named figures of C++ into Python's numbers and tuples."""
    result = {
        str(name): tuple(value) if isinstance(value, Sequence) else value
        for name, value in facts.items()
    }
    if "versions" in result:
        flat = result["versions"]
        result["versions"] = tuple(PlacedVersion(*flat[i : i + 4]) for i in range(0, len(flat), 4))
        flat = result["transfers"]
        result["transfers"] = tuple(
            Transfer(flat[i], bool(flat[i + 1]), *flat[i + 2 : i + 7])
            for i in range(0, len(flat), 7)
        )
    return result


def _limit(budget: int | None) -> int:
    return -1 if budget is None else budget
