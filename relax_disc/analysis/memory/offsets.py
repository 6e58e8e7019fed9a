"""Offsets in one arena for buffers with fixed lifetimes.

A few greedy placements, which reach the lower bound on most real programs; then, where a gap is
left, a depth-first search over canonical placements with restarts (after MiniMalloc, Moffitt,
ASPLOS 2024; see `src/planner/offsets/search.cc`). The amount of search is fixed, in steps and not
in seconds, so the result is the same on every machine.

Limits: problems with more than 3,000 buffers are placed greedily.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_disc.errors import GraphError
from relax_disc.vm_builtins.runtime import function


def plan_offsets(
    lower: Sequence[int], upper: Sequence[int], size: Sequence[int], capacity: int | None = None
) -> tuple[list[int], int]:
    """Place buffers so that none that live at the same time overlap.

    Parameters
    ----------
    lower, upper : sequence of int
        Each buffer lives from `lower` up to, but not including, `upper`.
    size : sequence of int
        Bytes, or any unit.
    capacity : int, optional
        A height to stay within: the search ends at the first placement that does. Without it the
        height is made small.

    Returns
    -------
    offsets : list of int
        One per buffer.
    arena_bytes : int
        The highest end of a buffer. More than `capacity` if no placement within it was found.

    Raises
    ------
    GraphError
        If the lists differ in length, a size is negative, a life ends before it begins, or the
        capacity is negative.
    """
    if not len(lower) == len(upper) == len(size):
        raise GraphError(
            f"lower, upper and size must list the same buffers: they have {len(lower)}, "
            f"{len(upper)} and {len(size)} entries"
        )
    for buffer, (begin, end, bytes_) in enumerate(zip(lower, upper, size, strict=True)):
        if end < begin or bytes_ < 0:
            raise GraphError(f"buffer {buffer} lives in [{begin}, {end}) and has size {bytes_}")
    if capacity is not None and capacity < 0:
        raise GraphError(f"capacity is {capacity}; give a height of 0 or more, or None")
    limit = -1 if capacity is None else capacity
    *offsets, height = function("relax_disc.plan_offsets")(lower, upper, size, limit)
    return offsets, height
