"""Search for windows; twin of `src/rematerialization_{search,ruin}.cc`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from relax_disc.vm_builtins.planner_twin_model import Model, Random
from relax_disc.vm_builtins.planner_twin_timeline import Timeline, Window

_PATIENCE, _BRIEF_PATIENCE = 60, 10
_SLOWEST = 6
_SHRINK_WORK, _BRIEF_WORK = 10_000_000, 15
_RETREATS = 6


@dataclass(frozen=True, slots=True)
class SearchStyle:
    """How candidates are ranked, and how much is tried for real.

    Attributes
    ----------
    ahead_percent : int
        A candidate counts once for each idle block whose peak is above this part of the limit.
    trials : int
        How many candidates are tried, the one with most relief per time being kept.
    thorough : bool
        Whether `Search.relax` tries what the quick test advises against.
    brief : bool
        Whether `Search.shrink` soon gives up.
    """

    ahead_percent: int
    trials: int
    thorough: bool
    brief: bool = False


@dataclass(frozen=True, slots=True)
class _Idle:
    """A copy that nobody reads for a while; between which blocks; the window to let it go."""

    gap: int
    window: Window
    after: int
    need: int


class Search:
    """A timeline and the moves that bring it under a limit.

    Attributes
    ----------
    timeline : Timeline
        The state.
    seen : callable
        Told of every state that is passed.
    """

    def __init__(self, model: Model, grace: int = 0) -> None:
        self.timeline = Timeline(model, grace)
        self.seen: Callable[[], None] = lambda: None
        self._model = model
        self._journal: list[tuple[int, Window]] = []
        self._banned: set[int] = set()
        self._noise: Random | None = None
        self._ruin_time = 0
        self._work = 0  # kernels that `_cost` went through

    def shrink(self, limit: int, floor: int, style: SearchStyle) -> bool:
        """Evict until the peak is within the limit, through states that take `floor` or more."""
        timeline, ruins = self.timeline, self._noise is not None
        slowest = (
            self._ruin_time + self._ruin_time // 8 if ruins else _SLOWEST * self._model.base_time
        )
        best, stalled = timeline.overflow(limit), 0
        most = _BRIEF_WORK * self._model.ops if style.brief else _SHRINK_WORK
        last_work = timeline.work + self._work + most
        patience = _BRIEF_PATIENCE if ruins or style.brief else _PATIENCE
        while timeline.peak() > limit:
            if timeline.time > slowest or timeline.work + self._work > last_work:
                return False
            overflow, time = timeline.overflow(limit), timeline.time
            chosen: tuple[float, int, Window] | None = None
            tried = 0
            for _, gap, window in self._collect(limit, style):
                if tried >= style.trials:
                    break
                old = timeline.windows[gap]
                timeline.set(gap, window)
                if timeline.valid and timeline.time >= floor:
                    tried += 1
                    relief = overflow - timeline.overflow(limit)
                    score = float(relief)
                    if relief > 0:
                        score /= float(max(timeline.time - time, 1))
                    if chosen is None or score > chosen[0]:
                        chosen = (score, gap, window)
                timeline.set(gap, old)
            if chosen is None:
                return False
            self._apply(chosen[1], chosen[2])
            if not ruins:
                self.seen()
            now = timeline.overflow(limit)
            if now < best:
                best, stalled = now, 0
            else:
                stalled += 1
                if stalled > patience:
                    return False
        return True

    def relax(self, limit: int, floor: int, thorough: bool) -> bool:
        """Take back or shorten evictions while the limit holds and time falls, to `floor`."""
        model, timeline = self._model, self.timeline
        spent = [0] * len(model.sizes)
        for block in timeline.executions:
            for op in block[:-1]:
                for tensor in model.outputs[op]:
                    spent[tensor] += model.rerun[op]
        order = [
            gap
            for gap, (low, high) in enumerate(timeline.windows)
            if low < high and spent[model.gap_tensor[gap]] > 0
        ]
        order.sort(key=lambda gap: -spent[model.gap_tensor[gap]])
        changed = False
        for gap in order:
            changed |= self._retreat(gap, limit, floor, thorough)
        return changed

    def ruin(self, limit: int, floor: int, style: SearchStyle, iterations: int) -> None:
        """So many times: take back a few evictions, shrink and relax; keep what is faster."""
        random, timeline = Random(self._model.ops), self.timeline
        for _ in range(iterations):
            self._ruin_time = timeline.time
            self._journal.clear()
            self._take_back_some(random)
            self._noise = random
            good = timeline.valid and self.shrink(limit, 0, style)
            self._noise = None
            self._banned.clear()
            if good:
                self.relax(limit, floor, style.thorough)
            if good and floor <= timeline.time < self._ruin_time:
                self.seen()
                continue
            for gap, window in reversed(self._journal):
                timeline.set(gap, window)
            self._journal.clear()

    def _apply(self, gap: int, window: Window) -> None:
        self._journal.append((gap, self.timeline.windows[gap]))
        self.timeline.set(gap, window)

    def _cost(self, tensor: int, block: int) -> int | None:
        """Time of bringing a tensor back in a block; None if that cannot be."""
        model, timeline = self._model, self.timeline
        seen, stack, cost = {tensor}, [tensor], 0
        while stack:
            op = model.producer[stack.pop()]
            if model.deadline[op] < block:
                return None
            cost += model.rerun[op]
            self._work += 1
            seen.update(model.outputs[op])
            for source in model.inputs[op]:
                if source not in seen:
                    seen.add(source)
                    if not timeline.is_touched(source, block) and not timeline.present(
                        source, block
                    ):
                        stack.append(source)
        return cost

    def _find_idle(self, tensor: int, block: int, position: int) -> _Idle | None:
        touches = self.timeline.touches[tensor]
        at = bisect_left(touches, (block,))
        if at == 0:
            return None
        here = at < len(touches) and touches[at][0] == block
        next_at = at + 1 if here else at
        later = next_at < len(touches) and touches[next_at][1] >= 0
        wait = False  # let go only after this block, which reads or makes it first
        after, need = touches[at - 1][0], touches[next_at][0] if later else block
        _, old_last, created, new_last = touches[at] if here else (0, -1, -1, -1)
        if here and 0 <= created <= position:
            if new_last >= position or not later:
                return None
            wait = True
        elif here and old_last > position:
            need = block
        elif here:
            if old_last == position or created >= 0 or not later:
                return None
            wait = True
        elif not later:
            return None
        if wait:
            after = block
        gap = self._model.gap_before(tensor, block)
        if gap < 0:
            return None
        low, high = self.timeline.windows[gap]
        new_high = block + 1 if wait else block
        if low < high and high >= new_high:
            return None
        new_low = low if low < high else max(after, self._model.points[gap])
        return _Idle(gap, (new_low, new_high), after, need) if new_low < new_high else None

    def _collect(self, limit: int, style: SearchStyle) -> list[tuple[float, int, Window]]:
        """What could be let go at the peak, best first."""
        model, timeline = self._model, self.timeline
        block = timeline.peak_block()
        position = timeline.peak_position[block]
        high = (limit + model.resident_bytes) // 100 * style.ahead_percent - model.resident_bytes
        overfull = [0]
        for peak in timeline.block_peaks():
            overfull.append(overfull[-1] + (peak > high))
        candidates: list[tuple[float, int, Window]] = []
        for tensor, can_go in enumerate(model.evictable):
            if not can_go or model.producer[tensor] >= block:
                continue
            idle = self._find_idle(tensor, block, position)
            if idle is None or idle.gap in self._banned:
                continue
            cost = self._cost(tensor, idle.need)
            if cost is None:
                continue
            relieved = overfull[max(idle.need, idle.after + 1)] - overfull[idle.after + 1]
            score = float(model.sizes[tensor]) * max(1, relieved)
            score /= float(cost + 1)
            if self._noise:
                score *= 800 + self._noise.below(401)
            candidates.append((score, idle.gap, idle.window))
        candidates.sort(key=lambda c: (-c[0], c[1]))
        return candidates

    def _may_fit(self, tensor: int, old: Window, option: Window, limit: int) -> bool:
        """Test quickly, before a retreat, for room where the tensor would lie idle."""
        room, start = limit - self._model.sizes[tensor], old[0]
        for block, _, _, _ in self.timeline.touches[tensor]:
            if block <= old[0]:
                continue
            if option[0] >= option[1] or block <= option[0] or start >= option[1]:
                for k in range(start + 1, block):
                    if self.timeline.block_peak(k) > room:
                        return False
            if block > old[1]:
                break
            start = block
        return True

    def _retreat(self, gap: int, limit: int, floor: int, thorough: bool) -> bool:
        """Replace a gap's window by the first smaller one that saves time within the limit."""
        model, timeline = self._model, self.timeline
        tensor, start = model.gap_tensor[gap], model.points[gap]
        low, high = old = timeline.windows[gap]
        if low >= high or gap in self._banned:
            return False
        options: list[Window] = [(start, start)]
        for at, _, _, _ in timeline.touches[tensor]:
            if start < at < model.gap_end[gap] and low < at < high:
                options += [(low, at), (at, high)]
        time = timeline.time
        for option in options[:_RETREATS]:
            if not thorough and not self._may_fit(tensor, old, option, limit):
                continue
            timeline.set(gap, option)
            if timeline.valid and floor <= timeline.time < time and timeline.peak() <= limit:
                self._journal.append((gap, old))
                self.seen()
                return True
            timeline.set(gap, old)
        return False

    def _take_back_some(self, random: Random) -> None:
        """Keep again what one to four recomputations that follow one another bring back."""
        model = self._model
        again = [
            (block, op)
            for block, executions in enumerate(self.timeline.executions)
            for op in executions[:-1]
        ]
        if not again:
            return
        at = random.below(len(again))
        left = 1 + random.below(4)
        while left > 0 and at < len(again):
            block, op = again[at]
            for tensor in model.outputs[op]:
                gap = model.gap_before(tensor, block)
                if gap < 0:
                    continue
                low, high = self.timeline.windows[gap]
                if low < high:
                    self._apply(gap, (model.points[gap], model.points[gap]))
                    self._banned.add(gap)
            at += 1 + random.below(3)
            left -= 1
