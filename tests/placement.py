"""Independent judges of arena plans: what lives together does not overlap, reads find their values.

They know the table of kernels and the numbers of a plan, and nothing of how it was made.
"""

from dataclasses import replace

from relax_disc.vm_builtins.plan_metadata import Storage
from relax_disc.vm_builtins.planner import PlacedVersion, PlannerGraph, PlannerOp
from relax_disc.vm_builtins.runtime import function
from tests.vm_builtins.planner_graphs import replay, run_in_arena

_OPERATIONS = {
    2: int.__add__,
    3: int.__sub__,
    4: int.__mul__,
    5: int.__floordiv__,
    6: int.__mod__,
    7: min,
    8: max,
}


def run_program(program, dims):
    """Evaluate a postfix program at the values of the dims."""
    stack = []
    codes = iter(program)
    for code in codes:
        if code == 0:
            stack.append(next(codes))
        elif code == 1:
            stack.append(dims[next(codes)])
        else:
            right = stack.pop()
            stack[-1] = _OPERATIONS[code](stack[-1], right)
    return stack[-1]


def workspace_bytes(metadata, kernel, values):
    """What a library kernel asks for beside its arguments; on a GPU it takes that from PyTorch."""
    formula, numbers = kernel.workspace if metadata.machine.is_host else ("", ())
    ask = function("relax_disc.cpu.workspace_bytes")
    return ask(formula, [values[number] for number in numbers]) if formula else 0


def graph_in_units(metadata, dims):
    """The table of kernels at a shape, in units of the alignment; every kernel takes 1 ns."""
    values = [run_program(program, dims) for program in metadata.programs]
    tensors = metadata.tensors
    given = {t.given: i for i, t in enumerate(tensors) if t.storage is Storage.GIVEN}
    ops = []
    for kernel in metadata.kernels:
        written = [t for t in kernel.outputs if tensors[t].storage is Storage.OVERWRITE]
        pairs = (*kernel.inplace, *((given[tensors[t].given], t) for t in written))
        own = -(-workspace_bytes(metadata, kernel, values) // metadata.machine.alignment)
        ops.append(PlannerOp(1, -1, own, kernel.inputs, kernel.outputs, pairs, kernel.recomputable))
    return PlannerGraph(
        sizes=tuple(
            -(-values[t.bytes] // metadata.machine.alignment) if t.storage is Storage.ARENA else 0
            for t in tensors
        ),
        resident=tuple(t.storage is Storage.GIVEN for t in tensors),
        is_output=tuple(t.storage in (Storage.ESCAPING, Storage.OVERWRITE) for t in tensors),
        ops=tuple(ops),
    )


def check_plan(session, dims, budget=None, buffer=True):
    """Replay a feasible plan over its arena and count all its figures anew.

    ``buffer``: whether transfers go through memory of their own.
    """
    facts, metadata = session.plan(dims, budget), session.metadata
    assert facts.feasible and (budget is None or facts.peak_bytes <= budget)
    unit = metadata.machine.alignment
    graph = graph_in_units(metadata, dims)

    class Plan:
        sequence = facts.sequence
        versions = tuple(
            PlacedVersion(v.tensor, v.created, v.last_use, v.offset // unit) for v in facts.versions
        )
        transfers = tuple(replace(t, slot=t.slot // unit) for t in facts.transfers)
        arena_bytes, tier_bytes = facts.arena_bytes // unit, facts.tier_bytes // unit

    assert facts.arena_bytes % unit == 0
    assert all(version.offset % unit == 0 for version in facts.versions)
    run_in_arena(graph, Plan, alignment=1)
    assert facts.live_peak_bytes <= facts.arena_bytes
    if not facts.transfers:
        assert replay(graph, facts.sequence)[0] * unit == facts.live_peak_bytes
    values = [run_program(program, dims) for program in metadata.programs]

    def total(storage, unit=1):
        found = (values[t.bytes] for t in metadata.tensors if t.storage is storage)
        return sum(-(-size // unit) * unit for size in found)

    assert facts.resident_bytes == total(Storage.GIVEN)
    assert facts.escaping_bytes == total(Storage.ESCAPING, unit)
    assert facts.workspace_bytes == max((op.workspace * unit for op in graph.ops), default=0)
    outside = facts.resident_bytes + facts.escaping_bytes + facts.buffer_bytes
    outside += facts.library_bytes
    if not metadata.machine.is_host:
        taken = [values[k.workspace[1][1]] for k in metadata.kernels if k.workspace[0]]
        assert facts.library_bytes == metadata.machine.library_bytes + max(taken, default=0)
    assert (facts.buffer_bytes > 0) == (buffer and bool(facts.transfers))
    assert facts.peak_bytes == outside + facts.arena_bytes
    assert facts.lower_bound_bytes <= outside + facts.live_peak_bytes
    again = [k for i, k in enumerate(facts.sequence) if k in facts.sequence[:i]]
    assert facts.recomputed == tuple(again)
    return facts


def check_placement(session, dims, budget=None):
    """No two tensors that live at the same time overlap, judged from the plan's numbers alone."""
    facts = check_plan(session, dims, budget)
    metadata = session.metadata
    allowed = {
        (k, source, target)
        for k, kernel in enumerate(metadata.kernels)
        for source, target in kernel.inplace
    }
    placed = []
    values = [run_program(program, dims) for program in metadata.programs]
    for version in facts.versions:
        if version.tensor < 0:
            size = workspace_bytes(metadata, metadata.kernels[-1 - version.tensor], values)
        else:
            entry = metadata.tensors[version.tensor]
            size = values[entry.bytes] if entry.storage is Storage.ARENA else 0
        if size:
            assert version.offset % metadata.machine.alignment == 0
            assert version.offset + size <= facts.arena_bytes
            placed.append((version, size))
    for i, (a, a_size) in enumerate(placed):
        for b, b_size in placed[i + 1 :]:
            if a.last_use < b.created or b.last_use < a.created:
                continue
            if a.offset + a_size <= b.offset or b.offset + b_size <= a.offset:
                continue
            first, second = (a, b) if a.created < b.created else (b, a)
            kernel = facts.sequence[second.created]
            assert first.last_use == second.created and first.offset == second.offset
            assert (kernel, first.tensor, second.tensor) in allowed
    return facts
