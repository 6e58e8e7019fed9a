"""Programs that follow from a front; twin of `src/planner/front_search.cc`.

They are shown as they are, and repaired at the rungs of ladders.

What a choice or a rung gives does not depend on the limit that is asked for, which only says where
to begin; so more memory is never slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from relax_disc.vm_builtins.planner_twin_chain import GRACE, ChainStyle, front_styles, rung_limit
from relax_disc.vm_builtins.planner_twin_front import Front
from relax_disc.vm_builtins.planner_twin_model import Model
from relax_disc.vm_builtins.planner_twin_search import Search

_LOOKS = 12


@dataclass(slots=True)
class _Ladder:
    """The next rung, its bytes, and the fastest choice within them."""

    style: ChainStyle
    rung: int
    limit: int = 0
    choice: int = 0


class FrontSearch:
    """A front and what follows from it.

    Attributes
    ----------
    search : Search
        Holds the program that is shown.
    found : callable
        Told of each program; `search.seen` is told of those on the way to it.
    shown_limit : int
        Limit of the choice or the rung that is shown: with less memory than that the program is not
        looked for, even where it needs less.
    shows_rung : bool
        Whether a rung is shown, not the plan of a choice as it is.
    bound : int
        No plan within the limit takes less time; 0 where that is not known.
    """

    def __init__(self, model: Model, effort: int, limit: int) -> None:
        self.search = Search(model, GRACE)
        self.found: Callable[[], None] = lambda: None
        self.shown_limit, self.shows_rung = 0, False
        self._model, self._limit = model, limit
        self._base_peak = self.search.timeline.peak()
        self._front = Front(model, self.search.timeline)
        self._choice = self._front.find(limit)
        self.bound = (self._time(self._choice) or 0) if self._front.exact else 0
        self._ladders = [_Ladder(style, style.divisions + 1) for style in front_styles(effort)]
        for ladder in self._ladders:
            self._lower(ladder)

    def next_time(self) -> int | None:
        """Return a time that no program still to come beats; None if there is none."""
        numbers = [self._choice, *(ladder.choice for ladder in self._ladders)]
        times = [time for time in map(self._time, numbers) if time is not None]
        return min(times, default=None)

    def next(self) -> None:
        """Show the plan of a choice, or what follows from a rung."""
        time = self.next_time()
        if self._time(self._choice) == time:
            self._show_choice(self._choice)
            self._choice += 1
            return
        ladder = next(ladder for ladder in self._ladders if self._time(ladder.choice) == time)
        self._show_rung(ladder)
        self._lower(ladder)

    def show_rest(self) -> None:
        """Show what rungs above the limit give, and the plans of all choices."""
        none = len(self._front.choices)
        for ladder in self._ladders:
            style = ladder.style
            for rung in range(style.divisions, 0, -1):
                limit = rung_limit(self._model, self._base_peak, style.divisions, rung)
                choice = self._front.find(limit)
                if limit <= self._limit or choice == none:
                    break
                self._show_rung(_Ladder(style, rung, limit, choice))
        for choice in reversed(range(none)):
            self._show_choice(choice)

    def _time(self, choice: int) -> int | None:
        choices = self._front.choices
        return choices[choice].time if choice < len(choices) else None

    def _lower(self, ladder: _Ladder) -> None:
        """Go to the next rung within the limit."""
        while True:
            ladder.rung -= 1
            ladder.limit = rung_limit(
                self._model, self._base_peak, ladder.style.divisions, ladder.rung
            )
            if ladder.limit <= self._limit:
                break
        none = len(self._front.choices)
        ladder.choice = self._front.find(ladder.limit) if ladder.rung > 0 else none

    def _take(self, choice: int) -> bool:
        """Make the plan of a choice; False where it cannot run or is faster than the choice."""
        timeline, wanted = self.search.timeline, self._front.choices[choice]
        timeline.assign(self._front.windows(wanted, GRACE))
        return timeline.valid and timeline.time >= wanted.time

    def _show_choice(self, choice: int) -> None:
        self.shown_limit = self._front.choices[choice].limit
        if self._take(choice):
            self.found()

    def _show_rung(self, ladder: _Ladder) -> None:
        """Bring the plan of the fastest choice below a rung; show the first that is below it."""
        search, style = self.search, ladder.style.search
        floor = self._front.choices[ladder.choice].time
        self.shown_limit, self.shows_rung = ladder.limit, True
        if self._take(ladder.choice) and search.shrink(ladder.limit, floor, style):
            search.relax(ladder.limit, floor, style.thorough)
            self.found()
        end = min(ladder.choice + _LOOKS, len(self._front.choices))
        for choice in range(ladder.choice + 1, end):
            if self._take(choice) and search.timeline.peak() <= ladder.limit:
                search.relax(ladder.limit, floor, style.thorough)
                self.found()
                break
        self.shows_rung = False
