"""Depth-first search over canonical placements; twin of `src/planner/offsets_search.cc`."""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass

from relax_disc.vm_builtins.planner_twin_model import Random

_NODES, _PERIOD, _TIGHT_PERIOD = 100, 6, 20
_ALONE = 1200
_BLAME = 5040


@dataclass(frozen=True, slots=True)
class OffsetProblem:
    """Buffers of non-zero size and their overlaps in time.

    Attributes
    ----------
    index : list of int
        Per buffer: its number in the caller's lists.
    first, last : list of int
        Per buffer: the sections [first, last) of time during which it lives.
    size : list of int
        Per buffer: bytes.
    overlaps : list of list of int
        Per buffer: others alive at the same time.
    load : list of int
        Per section: bytes alive.
    lower_bound : int
        The largest load.
    """

    index: list[int]
    first: list[int]
    last: list[int]
    size: list[int]
    overlaps: list[list[int]]
    load: list[int]
    lower_bound: int

    @property
    def count(self) -> int:
        """Number of buffers."""
        return len(self.size)

    def measures(self) -> tuple[list[int], list[int], list[int]]:
        """Return each buffer's width in sections, its area, and the largest load in its life."""
        lives = list(zip(self.first, self.last, strict=True))
        width = [end - begin for begin, end in lives]
        area = [w * s for w, s in zip(width, self.size, strict=True)]
        return width, area, [max(self.load[begin:end]) for begin, end in lives]


def search_offsets(problem: OffsetProblem, height: int, work: int) -> tuple[list[int] | None, int]:
    """Look for a placement within a height.

    Returns
    -------
    offsets : list of int or None
        Per buffer, or None where the work ran out.
    used : int
        The work done; all of it where there is no placement.
    """
    count, size = problem.count, problem.size
    width, area, crowd = problem.measures()
    orders = [
        _ranks(list(zip(*measures, strict=True)))
        for measures in (
            (width, area, crowd),
            (crowd, area, width),
            (crowd, width, area),
            (area, width, crowd),
            (size, width, crowd),
            (width, crowd, size),
        )
    ]
    free = Restarts(problem, height, _PERIOD, fills_tight=False)
    tight = Restarts(problem, height, _TIGHT_PERIOD, fills_tight=True)
    # Two frames for each buffer; frames of Python functions take no C stack.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 2 * count + 1000))
    while True:
        next_one = free if free.search.work <= _ALONE * count**2 + tight.search.work else tight
        found = next_one.run(orders)
        used = free.search.work + tight.search.work
        if found:
            return next_one.search.offsets, used
        if used >= work:
            return None, work


def _ranks(measures: list[tuple[int, int, int]]) -> list[int]:
    ranks = [0] * len(measures)
    for rank, buffer in enumerate(sorted(range(len(measures)), key=measures.__getitem__)):
        ranks[buffer] = rank
    return ranks


class Restarts:
    """Runs with changing preferences."""

    def __init__(
        self, problem: OffsetProblem, height: int, period: int, *, fills_tight: bool
    ) -> None:
        self.search = _Search(problem, height, fills_tight)
        self._period, self._random, self._round, self._turn = period, Random(1), 0, 0

    def run(self, orders: list[list[int]]) -> bool:
        """Do the next run, with one of the orders in turn."""
        search, ranks = self.search, orders[self._turn]
        most = max(1, *search.failures) if ranks else 1
        blame = self._random.below(5) if self._round else 0
        noise = self._random.below(4) if self._round else 0
        preference = [
            rank * 4096 // len(ranks)
            + blame * 1024 * failures // most
            + (noise * (self._random.below(83) - 41) if noise else 0)
            for rank, failures in zip(ranks, search.failures, strict=True)
        ]
        if search.run(preference, (1 + (self._round % self._period) ** 2) * _NODES):
            return True
        self._turn += 1
        if self._turn == len(orders):
            self._turn = 0
            self._round += 1
            search.failures = [f * 4 // 5 for f in search.failures]
        return False


class _Search:
    """Runs over one problem, and what they learn about its buffers."""

    def __init__(self, problem: OffsetProblem, height: int, fills_tight: bool) -> None:
        self._problem, self._height, self._fills_tight = problem, height, fills_tight
        self.failures = [0] * problem.count
        self.offsets: list[int] = []
        self.work = 0
        twins: dict[tuple[int, int, int], int] = {}
        self._twin: list[int] = []
        for i in range(problem.count):
            life = (problem.first[i], problem.last[i], problem.size[i])
            self._twin.append(twins.get(life, -1))
            twins[life] = i

    def run(self, preference: list[int], nodes: int) -> bool:
        """Try once, with the given preferences (larger first) and number of nodes."""
        problem, count = self._problem, self._problem.count
        self._preference, self._nodes_left = preference, nodes
        self.offsets = [-1] * count
        self._lowest, self._barred = [0] * count, [0] * count
        self._crossing = [0] * (len(problem.load) + 1)
        for i in range(count):
            self._cross(i, 1)
        return self._solve_parts(list(range(count)), -1, 0)

    def _cross(self, buffer: int, step: int) -> None:
        for t in range(self._problem.first[buffer] + 1, self._problem.last[buffer]):
            self._crossing[t] += step

    def _bound(
        self, buffers: list[int], bottom: int
    ) -> tuple[list[int], list[bool], int, list[int]] | None:
        """Lowest offsets, whether they lack support, the ceiling of what to try, tight sections."""
        problem, height = self._problem, self._height
        floating: list[bool] = []
        first: dict[int, int] = {}
        for i in buffers:
            least = max(bottom, self._barred[i])
            floating.append(self._lowest[i] < least)
            first[i] = max(self._lowest[i], least)
        low: list[int] = []
        floor: dict[int, int] = {}
        rest: dict[int, int] = {}
        ceiling = height
        for i, floats in zip(buffers, floating, strict=True):
            at = first[i]
            if floats:
                supports = [
                    first[j] + problem.size[j] for j in problem.overlaps[i] if self.offsets[j] < 0
                ]
                if not supports:
                    return None
                at = max(at, min(supports))
            low.append(at)
            size = problem.size[i]
            if at + size > height:
                self.failures[i] += _BLAME
                return None
            ceiling = min(ceiling, at + size)
            for t in range(problem.first[i], problem.last[i]):
                floor[t] = min(floor.get(t, at), at)
                rest[t] = rest.get(t, 0) + size
        for t in sorted(rest):
            if floor[t] + rest[t] > height:
                alive = [i for i in buffers if problem.first[i] <= t < problem.last[i]]
                for i in alive:
                    self.failures[i] += _BLAME // len(alive)
                return None
        least = min(low)
        tight = [t for t in sorted(rest) if floor[t] == least and least + rest[t] == height]
        return low, floating, ceiling, tight

    def _solve(self, buffers: list[int], bottom: int) -> bool:
        """Place all buffers of one connected part."""
        problem = self._problem
        self._nodes_left -= 1
        if self._nodes_left < 0:
            return False
        self.work += len(buffers)
        bounds = self._bound(buffers, bottom)
        if bounds is None:
            return False
        low, floating, ceiling, tight = bounds
        candidates = [
            a
            for a, i in enumerate(buffers)
            if not floating[a]
            and low[a] < ceiling
            and not (self._twin[i] >= 0 and self.offsets[self._twin[i]] < 0)
        ]
        if self._fills_tight and tight:
            candidates = self._fillers(
                buffers, [a for a in candidates if low[a] == min(low)], tight
            )
        candidates.sort(key=lambda a: (low[a], -self._preference[buffers[a]]))
        raised: list[tuple[int, int]] = []
        saved = [self._lowest[i] for i in buffers]
        solved = False
        for a in candidates:
            i, at = buffers[a], low[a]
            self.offsets[i] = at
            lonely = True
            for j in problem.overlaps[i]:
                if self.offsets[j] < 0:
                    self._lowest[j] = max(self._lowest[j], at + problem.size[i])
                    lonely = False
            self._cross(i, -1)
            solved = self._solve_parts(buffers, a, at)
            if solved:
                break
            self._cross(i, 1)
            for j, lowest in zip(buffers, saved, strict=True):
                self._lowest[j] = lowest
            self.offsets[i] = -1
            if self._nodes_left < 0 or lonely:
                break
            raised.append((i, self._barred[i]))
            self._barred[i] = max(self._barred[i], at + 1)
        for i, barred in reversed(raised):
            self._barred[i] = barred
        return solved

    def _fillers(self, buffers: list[int], lowest: list[int], tight: list[int]) -> list[int]:
        """Candidates at the floor of the tight section that has the fewest."""
        problem = self._problem
        alive = [
            [a for a in lowest if problem.first[buffers[a]] <= t < problem.last[buffers[a]]]
            for t in tight
        ]
        return min(alive, key=len)

    def _solve_parts(self, buffers: list[int], placed: int, bottom: int) -> bool:
        """Solve what is left without the buffer at position `placed`, part by part."""
        problem = self._problem
        rest = buffers[:placed] + buffers[placed + 1 :] if placed >= 0 else buffers
        if not rest:
            return True
        begin = min(problem.first[i] for i in rest)
        end = max(problem.last[i] for i in rest)
        cuts = [begin, *(t for t in range(begin + 1, end) if self._crossing[t] == 0)]
        if len(cuts) == 1:
            return self._solve(rest, bottom)
        parts: list[list[int]] = [[] for _ in cuts]
        for i in rest:
            parts[bisect_right(cuts, problem.first[i]) - 1].append(i)
        parts.sort(key=len)
        for done, part in enumerate(parts):
            if part and not self._solve(part, bottom):
                for i in (j for before in parts[:done] for j in before):
                    self.offsets[i] = -1
                    self._cross(i, 1)
                return False
        return True
