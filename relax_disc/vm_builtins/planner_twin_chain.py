"""Chains of programs down a ladder of budgets; twin of `src/planner/chain.cc`.

A chain looks at the graph alone, never at the budget that is asked for, and its programs never get
faster on the way down. So the fastest program within a budget is a function of graph and budget in
which more memory is never slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_disc.vm_builtins.planner_twin_model import Model
from relax_disc.vm_builtins.planner_twin_search import Search, SearchStyle
from relax_disc.vm_builtins.planner_twin_timeline import base_windows

EFFORT_FAST, EFFORT_NORMAL, EFFORT_HIGH = 0, 1, 2

_LARGE, _SMALL = 3000, 1000
GRACE = 4
_MOST_RUINS, _RUIN_WORK = 300, 100_000


@dataclass(frozen=True, slots=True)
class ChainStyle:
    """A ladder and a way down.

    Attributes
    ----------
    divisions : int
        Rungs are multiples of this part of the peak without recomputation.
    search : SearchStyle
        How to go from one to the next.
    ruins : bool
        Whether each rung ends in `Search.ruin`.
    grace : int
        See `base_windows`.
    """

    divisions: int
    search: SearchStyle
    ruins: bool = False
    grace: int = 0


def chain_styles(model: Model, effort: int) -> list[ChainStyle]:
    """Return the chains of an effort; a higher effort has all of a lower one's."""
    small = model.ops <= _SMALL
    styles = [
        ChainStyle(80, SearchStyle(80, 1, False), grace=GRACE),
        ChainStyle(20, SearchStyle(80, 4 if small else 12, False), grace=GRACE),
        ChainStyle(80, SearchStyle(100, 6, False)),
    ]
    if effort >= EFFORT_NORMAL:
        if small:
            styles.append(ChainStyle(20, SearchStyle(80, 12, False), grace=GRACE))
        table = [(10, 70, 6), (20, 100, 12)]
        if model.ops <= _LARGE:
            table += [
                (10, 100, 6),
                (10, 50, 12),
                (20, 80, 1),
                (20, 50, 12),
                (40, 100, 1),
                (80, 100, 12),
                (80, 80, 1),
            ]
        styles += [
            ChainStyle(divisions, SearchStyle(ahead, trials, True))
            for divisions, ahead, trials in table
        ]
    if effort >= EFFORT_HIGH:
        styles.append(ChainStyle(40, SearchStyle(100, 6, False), ruins=True))
    return styles


def front_styles(effort: int) -> list[ChainStyle]:
    """Return the ladders of `FrontSearch` at an effort."""
    styles = [ChainStyle(80, SearchStyle(100, 12, False, brief=True), grace=GRACE)]
    if effort >= EFFORT_NORMAL:
        styles.append(ChainStyle(160, SearchStyle(80, 6, False, brief=True), grace=GRACE))
    return styles


def rung_limit(model: Model, base_peak: int, divisions: int, rung: int) -> int:
    """Return the live bytes that a rung allows: parts of the peak without recomputation."""
    whole = base_peak + model.resident_bytes
    return whole // divisions * rung + whole % divisions * rung // divisions - model.resident_bytes


def lower_bound(model: Model) -> int:
    """Return the live bytes, residents apart, that every order-preserving program needs."""
    bound = stuck = 0
    begins: list[list[int]] = [[] for _ in range(model.ops + 1)]
    ends: list[list[int]] = [[] for _ in range(model.ops + 1)]
    for tensor, made in enumerate(model.producer):
        if made < 0 or len(model.blocks[tensor]) < 2:
            continue
        # From here on the tensor cannot be made again.
        start = max(made + 1, model.deadline[made]) if model.evictable[tensor] else made + 1
        stop = model.blocks[tensor][-1]
        if start < stop:
            begins[start].append(tensor)
            ends[stop].append(tensor)
    alive: set[int] = set()
    for k in range(model.ops + 1):
        stuck -= sum(model.sizes[t] for t in ends[k])
        alive.difference_update(ends[k])
        stuck += sum(model.sizes[t] for t in begins[k])
        alive.update(begins[k])
        here = stuck + model.workspace[k]
        here += sum(model.sizes[t] for t in model.inputs[k] if t not in alive)
        here += sum(model.sizes[t] for t in model.outputs[k])
        here -= sum(model.sizes[t] for t, _ in model.shared_pairs(k, lambda _: True))
        bound = max(bound, here)
    return bound


class Chain:
    """A search on its way down.

    Attributes
    ----------
    search : Search
        Holds the current rung's program.
    limit : int
        Live bytes that the rung allows.
    time : int
        Time of the rung's program.
    """

    def __init__(self, model: Model, style: ChainStyle, bound: int) -> None:
        self._model, self._style, self._bound = model, style, bound
        self.search = Search(model, style.grace)
        self.limit = self._base_peak = self.search.timeline.peak()
        self.time = model.base_time
        self._rung = style.divisions

    def descend(self) -> bool:
        """Go down to the next rung; False, and nothing changed, if it cannot be reached."""
        if self._rung <= 0 or self.limit <= self._bound:
            return False
        self._rung -= 1
        model, style, search = self._model, self._style, self.search
        last_limit = self.limit
        part = rung_limit(model, self._base_peak, style.divisions, self._rung)
        self.limit = max(part, self._bound)
        if search.timeline.peak() <= self.limit:
            return True
        last = list(search.timeline.windows)
        if search.shrink(self.limit, self.time, style.search):
            search.relax(self.limit, self.time, style.search.thorough)
        elif not self._start_again():
            search.timeline.assign(last)
            self.limit = last_limit
            self._rung = 0
            return False
        if style.ruins:
            iterations = min(max(_RUIN_WORK // (model.ops + 1), 4), _MOST_RUINS)
            search.ruin(self.limit, self.time, style.search, iterations)
        self.time = search.timeline.time
        return True

    def _start_again(self) -> bool:
        """Try to reach the rung from the program without recomputation."""
        search, style = self.search, self._style.search
        seen, search.seen = search.seen, lambda: None
        search.timeline.assign(base_windows(self._model, self._style.grace))
        reached = search.shrink(self.limit, 0, style)
        if reached:
            search.relax(self.limit, self.time, style.thorough)
        search.seen = seen
        if not reached or search.timeline.time < self.time:
            return False
        search.seen()
        return True
