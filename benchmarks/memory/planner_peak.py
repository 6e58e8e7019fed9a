"""The peak of live bytes of a sequence of kernels, by code that the planners have no part in."""

from __future__ import annotations

from relax_disc.vm_builtins.planner import PlannerGraph


def planner_peak(planner: PlannerGraph, sequence: tuple[int, ...]) -> int:
    """Return the peak of a sequence, counted afresh from the definition.

    Parameters
    ----------
    planner : PlannerGraph
        The program.
    sequence : tuple of int
        Positions of kernels, recomputations among them; every input must have been made.

    Returns
    -------
    int
        Bytes, of what is always resident too.
    """
    sizes, given = planner.sizes, planner.resident
    inside = [size > 0 and not stays for size, stays in zip(sizes, given, strict=True)]
    for op in planner.ops:
        for source, target in op.inplace:
            inside[target] &= not given[source]
    last: dict[tuple[int, int], int] = {}
    current: dict[int, tuple[int, int]] = {}
    for position, k in enumerate(sequence):
        for tensor in planner.ops[k].inputs:
            if inside[tensor]:
                last[current[tensor]] = position
        for tensor in planner.ops[k].outputs:
            if inside[tensor]:
                current[tensor] = (tensor, position)
                last[tensor, position] = position
    for tensor, version in current.items():
        if planner.is_output[tensor]:
            last[version] = len(sequence)
    change = [0] * (len(sequence) + 2)
    for (tensor, first), end in last.items():
        change[first] += sizes[tensor]
        change[end + 1] -= sizes[tensor]
    current.clear()
    peak = live = 0
    for position, k in enumerate(sequence):
        op = planner.ops[k]
        live += change[position]
        here, used = live + op.workspace, set[int]()
        for source, target in op.inplace:
            alike = inside[source] and inside[target] and sizes[source] == sizes[target]
            if alike and last[current[source]] == position and not {source, target} & used:
                used |= {source, target}
                here -= sizes[target]
        for tensor in op.outputs:
            current[tensor] = (tensor, position)
        peak = max(peak, here)
    return peak + sum(size for size, stays in zip(sizes, given, strict=True) if stays)
