"""Exact memory timeline of a program; twin of `src/planner/timeline.cc`.

A plan gives each gap of each tensor (see `Model`) a window ``(low, high)`` of blocks at whose ends
the tensor is not kept. A block that needs an absent tensor first runs its kernel again,
recursively. Everything else follows from the windows, so a change is undone by setting the window
back.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left

from relax_disc.vm_builtins.planner_twin_model import Model

FOREVER = 1 << 29

Window = tuple[int, int]
# Block, last read of the copy that came in, where a new copy is made, last read of that one.
Touch = tuple[int, int, int, int]


def base_windows(model: Model, grace: int = 0) -> list[Window]:
    """Return the plan in which nothing runs again.

    A kernel that later plans run again finds a tensor up to `grace` blocks after its last reader:
    it is then kept until there.
    """
    dies = [
        model.is_tail[gap] and model.evictable[tensor]
        for gap, tensor in enumerate(model.gap_tensor)
    ]
    return [
        (point + grace, FOREVER) if dies[gap] else (point, point)
        for gap, point in enumerate(model.points)
    ]


class Timeline:
    """What a plan's windows lead to, kept up to date as they change."""

    def __init__(self, model: Model, grace: int = 0) -> None:
        self._model = model
        self.windows = base_windows(model, grace)
        self.touches: list[list[Touch]] = [[] for _ in model.sizes]
        self.executions: list[list[int]] = [[] for _ in range(model.ops + 1)]
        self.peak_position = [0] * (model.ops + 1)
        self.time = model.base_time
        self.work = 0  # executions gone through so far
        self._touched: list[dict[int, list[int]]] = [{} for _ in range(model.ops + 1)]
        self._local_peak = [0] * (model.ops + 1)
        self._late = [0] * (model.ops + 1)
        self._carried = [0] * (model.ops + 2)
        self._dirty: list[int] = []
        self._stale: set[int] = set()
        for k in range(model.ops + 1):
            self._mark_dirty(k)
        self._flush()

    @property
    def valid(self) -> bool:
        """False if some kernel would run again after its input's buffer was overwritten."""
        return not any(self._late)

    def block_peak(self, block: int) -> int:
        """Return the most live bytes in a block."""
        return self._carried[block] + self._local_peak[block]

    def block_peaks(self) -> list[int]:
        """Return the most live bytes of each block."""
        return [a + b for a, b in zip(self._carried, self._local_peak, strict=False)]

    def peak(self) -> int:
        """Return the most live bytes."""
        return max(self.block_peaks())

    def peak_block(self) -> int:
        """Return the first block with the most live bytes."""
        peaks = self.block_peaks()
        return peaks.index(max(peaks))

    def overflow(self, limit: int) -> int:
        """Return the bytes above a limit, summed over blocks."""
        return sum(peak - limit for peak in self.block_peaks() if peak > limit)

    def sequence(self) -> list[int]:
        """Return the kernels in the order that they run."""
        return [op for block in self.executions for op in block][:-1]

    def present(self, tensor: int, block: int) -> bool:
        """Return whether a tensor is there when a block starts."""
        gap = self._model.gap_before(tensor, block)
        if gap < 0:
            return False
        low, high = self.windows[gap]
        if low >= high or block <= low:
            return True
        if block <= high:
            return False
        touches = self.touches[tensor]
        at = bisect_left(touches, (high,))
        return at < len(touches) and touches[at][0] < block

    def is_touched(self, tensor: int, block: int) -> bool:
        """Return whether a block reads or makes a tensor."""
        return tensor in self._touched[block]

    def set(self, gap: int, window: Window) -> None:
        """Change one window."""
        model, before = self._model, self.windows[gap]
        tensor = model.gap_tensor[gap]
        for touch in self._touches_in(gap):
            self.windows[gap] = before
            was = self.present(tensor, touch[0])
            self.windows[gap] = window
            if self.present(tensor, touch[0]) != was:
                self._mark_dirty(touch[0])
        self.windows[gap] = window
        self._flush()

    def assign(self, windows: list[Window]) -> None:
        """Change all windows."""
        for gap, window in enumerate(windows):
            if self.windows[gap] != window:
                for touch in self._touches_in(gap):
                    self._mark_dirty(touch[0])
                self.windows[gap] = window
        self._flush()

    def _touches_in(self, gap: int) -> list[Touch]:
        touches = self.touches[self._model.gap_tensor[gap]]
        first = bisect_left(touches, (self._model.points[gap] + 1,))
        return touches[first : bisect_left(touches, (self._model.gap_end[gap] + 1,))]

    def _mark_dirty(self, block: int) -> None:
        if block not in self._dirty:
            heapq.heappush(self._dirty, block)

    def _flush(self) -> None:
        while self._dirty:
            self._rebuild(heapq.heappop(self._dirty))
        for block in sorted(self._stale):
            self._measure(block)
        self._stale.clear()

    def _rebuild(self, block: int) -> None:
        """Run a block again and tell later ones what came or went."""
        model = self._model
        executions: list[int] = []
        local: dict[int, list[int]] = {}  # per tensor: the last three numbers of its touch

        def execute(op: int) -> None:
            position = len(executions)
            executions.append(op)
            for t in model.inputs[op]:
                touch = local.setdefault(t, [-1, -1, -1])
                touch[2 if touch[1] >= 0 else 0] = position
            for t in model.outputs[op]:
                touch = local.setdefault(t, [-1, -1, -1])
                touch[1] = touch[2] = position

        def have(tensor: int) -> bool:
            return tensor in local or self.present(tensor, block)

        for tensor in model.inputs[block]:
            if have(tensor):
                continue
            stack = [model.producer[tensor]]
            while stack:
                absent = next((t for t in model.inputs[stack[-1]] if not have(t)), None)
                if absent is None:
                    execute(stack.pop())
                else:
                    stack.append(model.producer[absent])
        execute(block)

        for op in self.executions[block][:-1]:
            self.time -= model.rerun[op]
        for op in executions[:-1]:
            self.time += model.rerun[op]
        self.work += len(executions)
        self._late[block] = sum(model.deadline[op] < block for op in executions[:-1])
        old = self._touched[block]
        self.executions[block] = executions
        self._touched[block] = local
        for tensor in old:
            if tensor not in local:
                self._replace(tensor, block, old[tensor], None)
        for tensor, touch in local.items():
            if old.get(tensor) != touch:
                self._replace(tensor, block, old.get(tensor), touch)
        self._stale.add(block)

    def _replace(
        self, tensor: int, block: int, before: list[int] | None, after: list[int] | None
    ) -> None:
        """Put one touch of a tensor in the place of another; either may be missing."""
        model, touches = self._model, self.touches[tensor]
        self._carry(tensor, -1)
        at = bisect_left(touches, (block,))
        new: list[Touch] = [(block, after[0], after[1], after[2])] if after else []
        touches[at : at + (before is not None)] = new
        self._carry(tensor, 1)
        if at:
            self._stale.add(touches[at - 1][0])
        if before is not None and after is not None:
            return
        if after is not None:
            at += 1
        gap = model.gap_before(tensor, block)
        if at == len(touches) or gap < 0:
            return
        low, high = self.windows[gap]
        if low < high <= block and touches[at][0] <= model.gap_end[gap]:
            self._mark_dirty(touches[at][0])

    def _carry(self, tensor: int, sign: int) -> None:
        """Add, or take off, what a tensor's copies hold across block boundaries."""
        size = sign * self._model.sizes[tensor]
        created = last = -1
        for block, old_last, made, _ in (*self.touches[tensor], (-1, -1, 0, 0)):
            if old_last >= 0:
                last = block
            if made >= 0:
                if created >= 0:
                    for k in range(created + 1, last + 1):
                        self._carried[k] += size
                created = last = block

    def _leaves(self, tensor: int, at: int) -> bool:
        """Whether the copy that a touch leaves behind is read later."""
        touches = self.touches[tensor]
        return at + 1 < len(touches) and touches[at + 1][1] >= 0

    def _dies_at(self, tensor: int, block: int, position: int) -> bool:
        """Whether the copy of a tensor that is read at a position is read there last."""
        at = bisect_left(self.touches[tensor], (block,))
        _, old_last, created, new_last = self.touches[tensor][at]
        incoming = created < 0 or position <= created
        leaves = (not incoming or created < 0) and self._leaves(tensor, at)
        return position == (old_last if incoming else new_last) and not leaves

    def _measure(self, block: int) -> None:
        """Find a block's peak above what is carried into it."""
        model, executions = self._model, self.executions[block]
        deaths = [0] * len(executions)
        for tensor, (old_last, created, new_last) in self._touched[block].items():
            size = model.sizes[tensor]
            leaves = self._leaves(tensor, bisect_left(self.touches[tensor], (block,)))
            if created < 0:
                if not leaves:
                    deaths[old_last] += size
            else:
                if old_last >= 0:
                    deaths[old_last] += size
                if not leaves:
                    deaths[new_last] += size
        live, best = 0, None
        for position, op in enumerate(executions):
            live += sum(model.sizes[t] for t in model.outputs[op])
            here = live + model.workspace[op]
            for _, output in model.shared_pairs(
                op, lambda t, p=position: self._dies_at(t, block, p)
            ):
                here -= model.sizes[output]
            if best is None or here > best:
                best = here
                self.peak_position[block] = position
            live -= deaths[position]
        self._local_peak[block] = best or 0
