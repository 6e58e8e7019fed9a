"""What to do without at the peak: a knapsack; twin of `src/planner/front.cc`.

At one block, the peak of the program without recomputation, a plan is little more than the set of
tensors that it keeps across the block. A tensor that is read later is kept, or its kernel runs
again; then the same holds for what that kernel reads. A dynamic program goes through the kernels
before the block from the last to the first; for each set of tensors that those behind it want, it
holds the pairs of bytes and time that no other pair beats.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_disc.vm_builtins.planner_twin_model import Model
from relax_disc.vm_builtins.planner_twin_timeline import Timeline, Window, base_windows

_SMALL_PART = 500
_ENTRIES = 512
_STATES = 16
_SLOTS = 64

# Bytes, time, and the kernels that run again as a linked list.
_Again = tuple["_Again | None", int]
_Entry = tuple[int, int, _Again | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """Kernels to run again.

    Attributes
    ----------
    limit, time : int
        If the front is exact, no plan within so many live bytes takes less time.
    again : frozenset of int
        The kernels.
    """

    limit: int
    time: int
    again: frozenset[int]


class Front:
    """All choices that no other beats.

    Attributes
    ----------
    choices : list of Choice
        The fastest first.
    exact : bool
        False where choices were left out to save time.
    """

    def __init__(self, model: Model, base: Timeline) -> None:
        self._model = model
        self._block = base.peak_block()
        self.exact = True
        self._later: list[bool] = []
        self._keep: list[int] = []
        self._slot: dict[int, int] = {}
        fixed = self._prepare(base.peak())
        self._bucket = base.peak() // _ENTRIES + 1
        self._states: dict[int, list[_Entry]] = {0: [(0, model.base_time, None)]}
        for op in range(self._block - 1, -1, -1):
            self._step(op)
        entries = next(iter(self._states.values()))
        self.choices = [
            Choice(fixed + size, time, _kernels(again)) for size, time, again in reversed(entries)
        ]

    def find(self, limit: int) -> int:
        """Return the number of the first choice within a limit, that of all if there is none."""
        for at, choice in enumerate(self.choices):
            if choice.limit <= limit:
                return at
        return len(self.choices)

    def windows(self, choice: Choice, grace: int) -> list[Window]:
        """Return the plan that follows a choice."""
        model, block = self._model, self._block
        windows = base_windows(model, grace)
        for op in sorted(choice.again):
            for tensor in model.outputs[op]:
                gap = model.gap_before(tensor, block)
                if not model.is_tail[gap] and model.points[gap + 1] == block:
                    windows[gap + 1] = (block, block + 1)
                else:
                    windows[gap] = (model.points[gap], block)
            for tensor in model.inputs[op]:
                tail = model.first_gap[tensor] + len(model.blocks[tensor]) - 1
                point = model.points[tail]
                if model.producer[tensor] not in choice.again and point <= block:
                    windows[tail] = (point, point)  # wanted again: kept until then
        return windows

    def _prepare(self, peak: int) -> int:
        """Find what each tensor adds to the block; return the bytes that are there in any case."""
        model, block = self._model, self._block
        before = [0 <= made < block for made in model.producer]
        self._later = [is_ and model.blocks[t][-1] > block for t, is_ in enumerate(before)]
        self._keep = [size if is_ else 0 for size, is_ in zip(model.sizes, before, strict=True)]
        fixed = model.workspace[block]
        for tensor in model.inputs[block]:
            fixed += model.sizes[tensor]
            self._keep[tensor] = 0
        fixed += sum(model.sizes[tensor] for tensor in model.outputs[block])
        for source, _ in model.shared_pairs(block, lambda _: True):
            fixed -= model.sizes[source]  # the output takes its place, unless it is kept
            self._keep[source] = model.sizes[source]
        total = least = 0
        for size in sorted(model.sizes[t] for t, is_ in enumerate(self._later) if is_):
            least = size
            total += size
            if total > peak // _SMALL_PART:
                break
        self._keep = [size if size >= least else 0 for size in self._keep]
        return fixed

    def _want(self, op: int) -> int:
        """Give the tensors that a kernel reads a slot; return those that running it again wants."""
        wanted = 0
        for tensor in self._model.inputs[op]:
            if self._later[tensor] or self._keep[tensor] == 0:
                continue
            if tensor not in self._slot:
                used = set(self._slot.values())
                free = next((slot for slot in range(_SLOTS) if slot not in used), None)
                if free is None:
                    self._later[tensor] = True  # count it as wanted in any case
                    self.exact = False
                    continue
                self._slot[tensor] = free
            wanted |= 1 << self._slot[tensor]
        return wanted

    def _step(self, op: int) -> None:
        """Decide about what a kernel makes: not wanted, kept, or made again."""
        model, keep = self._model, self._keep
        outputs = model.outputs[op]
        slots = [(keep[t], 1 << self._slot[t]) for t in outputs if t in self._slot]
        mine = sum(bit for _, bit in slots)
        always = sum(keep[t] for t in outputs if self._later[t])
        if not any(keep[t] for t in outputs) or not (always or mine):
            return
        again = model.deadline[op] > self._block and all(model.evictable[t] for t in outputs)
        wants = self._want(op) if again else 0
        states: dict[int, list[_Entry]] = {}
        for state, entries in self._states.items():
            size = always + sum(kept for kept, bit in slots if state & bit)
            wanted = state & ~mine
            if again and size > 0:
                rerun = model.rerun[op]
                made: list[_Entry] = [
                    (kept, time + rerun, (node, op)) for kept, time, node in entries
                ]
                self._add(states, wanted | wants, made)
            self._add(states, wanted, [(kept + size, time, node) for kept, time, node in entries])
        for tensor in outputs:
            self._slot.pop(tensor, None)
        self._states = states
        self._narrow()

    def _narrow(self) -> None:
        """Tell fewer sets apart: count tensors that only some of them want as wanted."""
        while len(self._states) > _STATES:
            self.exact = False
            some, all_ = 0, -1
            for wanted in self._states:
                some |= wanted
                all_ &= wanted
            differing = some & ~all_
            states: dict[int, list[_Entry]] = {}
            for wanted, entries in self._states.items():
                self._add(states, wanted | (differing & -differing), entries)
            self._states = states

    def _add(self, states: dict[int, list[_Entry]], wanted: int, entries: list[_Entry]) -> None:
        """Add entries to those of a set; of two with the same figures the older one stays."""
        if wanted not in states:
            states[wanted] = entries
            return
        merged: list[_Entry] = []
        both = [*states[wanted], *entries]
        for entry in sorted(both, key=lambda e: (e[0], e[1])):
            if not merged or entry[1] < merged[-1][1]:
                merged.append(entry)
        states[wanted] = self._thin(merged) if len(merged) > _ENTRIES else merged

    def _thin(self, entries: list[_Entry]) -> list[_Entry]:
        """Keep the fastest entry of each bucket of bytes."""
        thinned = list({entry[0] // self._bucket: entry for entry in entries}.values())
        self.exact = self.exact and len(thinned) == len(entries)
        return thinned


def _kernels(again: _Again | None) -> frozenset[int]:
    kernels: set[int] = set()
    while again is not None:
        again, op = again
        kernels.add(op)
    return frozenset(kernels)
