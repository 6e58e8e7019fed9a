"""Minimise the peak of live memory over the legal orders, and bound it from below.

The method.  While op i runs, what is live is no less than one minimum cut, in any order.  So the
cut at the op where an order peaks either equals the peak, and then the order is optimal, or its two
sides say which ops to run before i and after i to do better there.  Each side is a problem of the
same kind: solve it, starting from list schedules in both directions and a depth-first order, and
join.  Where a side cannot be brought below the peak, the op that blocks it is forced to the other
side of the cut, and the cut is made anew.

On large irregular graphs one bad split high up spoils everything below.  So where splitting ends
the order is improved in windows: the steps around the peak are a problem of the same kind too, and
whatever order they get, the steps outside are not affected.  Windows grow from 17 steps to the
whole program; where none helps the whole is split again.

At last the bound is raised: by cuts at more ops, and by edges that every better order has.

Sizes are known at several points; the peak to be minimised is the greatest over the points.

Work is counted in arcs looked at, and limited: the same limit gives the same order on any machine.
The search is in `vm_builtins/src/schedule`.

Limits: the bound is of each op alone, and is weak on graphs without structure.  Nothing guarantees
an optimum, but is_optimal is a proof: the bound equals the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_disc.analysis.schedule.problem import ScheduleProblem
from relax_disc.vm_builtins.runtime import function


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    order: list[int]  # the best order found
    peak: int  # its greatest peak over the points
    bound: int  # no order's greatest peak is smaller
    work: int  # arcs looked at
    timed_out: bool  # whether the time limit ended the search: then another run may end elsewhere


def split_search(
    problem: ScheduleProblem,
    starts: Sequence[Sequence[int]] = (),
    *,
    target: int = 0,
    work: int,
    seconds: float,
) -> Found:
    """Minimise the greatest peak over the points.

    Its own order is one of the starts. ``starts``: legal orders to start from, beside the seeds.
    ``target``: a peak that is good enough.
    """
    search = function("relax_disc.schedule.split")
    facts = dict(search(problem.lists(), starts, target, work, seconds))
    return Found(list(facts.pop("order")), **facts)
