"""The memory of one planned call, kernel by kernel: what is live, what was evicted, what came back.

>>> timeline = step.plan(batch=14, seq=512).timeline
>>> timeline.peak_step, timeline.alive(timeline.peak_step)[0].source

It is read from the plan that the run time follows, so that nothing is estimated; only the durations
of the kernels are modelled, or follow from what `TrainingStep.calibrate` measured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from relax_disc.analysis.memory.report import graph_of_table
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.vm_builtins.guard import GUARD
from relax_disc.vm_builtins.plan_metadata import PlanMetadata, Storage
from relax_disc.vm_builtins.session import ArenaFacts, Session

_CATEGORY_OF_KIND = {
    "parameter": "parameters",
    "state": "optimizer state",
    "buffer": "buffers",
    "gradient": "gradient sums",
    "batch": "batch",
}
CATEGORIES = (
    *_CATEGORY_OF_KIND.values(),
    *("constants", "outputs", "library buffers", "offload buffer"),
    *("workspace", "activations", "gradients"),
)
"""From below to above in a picture; only the last three change while a step runs."""
_WITHOUT_LINE = {GUARD: "the settings of the optimizer, once the batch has been checked"}
"""What kernels make that no line of the model asks for."""


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One execution of a kernel.

    Attributes
    ----------
    name, source : str
        The kernel, and the line of the user's model that it comes from.
    start_ns, time_ns : int
        Modelled, from the beginning of the step.
    again : bool
        Whether it ran before in this step: it regenerates what was evicted.
    """

    name: str
    source: str
    start_ns: int
    time_ns: int
    again: bool


@dataclass(frozen=True, slots=True)
class Life:
    """One stay of a tensor in the arena, during the runs `first` to `last`, inclusive.

    Attributes
    ----------
    tensor : int
        Index in the program; two lives of one tensor have the same.
    name : str
        For reports.
    category : str
        ``"activations"``, of which the loss is computed, or ``"gradients"``: all other values of
        the backward pass and the update.
    bytes, offset : int
        Its place in the arena.
    first, last : int
        Indices in `Timeline.runs`.
    made_by, source : str
        The kernel that makes it, and the line of the user's model.
    reloaded : bool
        It begins by reading the tensor back, not by that kernel.
    """

    tensor: int
    name: str
    category: str
    bytes: int
    offset: int
    first: int
    last: int
    made_by: str
    source: str
    reloaded: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """A tensor is evicted after the run `first` and there again from the run `last` on.

    ``reloaded``: it is read back from where it was offloaded to; else a kernel runs again.
    """

    name: str
    source: str
    bytes: int
    first: int
    last: int
    reloaded: bool = False


@dataclass(frozen=True, slots=True)
class TransferRun:
    """A tensor on its way to where it is offloaded to, or back.

    Attributes
    ----------
    name, source : str
        The tensor, and the line of the user's model that made it.
    bytes : int
        Its size.
    is_read : bool
        On its way back.
    start_ns, time_ns : int
        Modelled, from the beginning of the step.
    """

    name: str
    source: str
    bytes: int
    is_read: bool
    start_ns: int
    time_ns: int


@dataclass(frozen=True)
class Timeline:
    """The memory of a call over its runs of kernels.

    Attributes
    ----------
    shape : mapping of str to int
        The value of each dim.
    budget_bytes : int or None
        The budget that the plan was made for.
    peak_bytes : int
        All memory of the call: what a budget bounds.
    arena_bytes : int
        Height of the arena; more than its most live bytes where places do not fit seamlessly.
    runs : tuple of KernelRun
        In their order.
    lives : tuple of Life
        By their beginning.
    transfers : tuple of TransferRun
        One after the other, beside the runs.
    constant_bytes : mapping of str to int
        What is there from the beginning to the end, by category.
    """

    shape: Mapping[str, int]
    budget_bytes: int | None
    peak_bytes: int
    arena_bytes: int
    runs: tuple[KernelRun, ...]
    lives: tuple[Life, ...]
    transfers: tuple[TransferRun, ...]
    constant_bytes: Mapping[str, int]

    @functools.cached_property
    def live_bytes(self) -> Mapping[str, tuple[int, ...]]:
        """Bytes by category, one number for each run; only categories that are there."""
        live = {name: [size] * len(self.runs) for name, size in self.constant_bytes.items()}
        for life in self.lives:
            row = live.setdefault(life.category, [0] * len(self.runs))
            for run in range(life.first, life.last + 1):
                row[run] += life.bytes
        return {name: tuple(live[name]) for name in CATEGORIES if any(live.get(name, ()))}

    @functools.cached_property
    def total_bytes(self) -> tuple[int, ...]:
        """Live bytes of all categories, one number for each run."""
        return tuple(map(sum, zip(*self.live_bytes.values(), strict=True)))

    @property
    def peak_step(self) -> int:
        """The run during which most is live; -1 where nothing runs."""
        return max(range(len(self.runs)), key=self.total_bytes.__getitem__, default=-1)

    @property
    def unused_bytes(self) -> int:
        """Bytes of the arena beyond the most that lives in it: places do not fit seamlessly."""
        most = max(self.total_bytes, default=sum(self.constant_bytes.values()))
        return self.arena_bytes - (most - sum(self.constant_bytes.values()))

    def alive(self, run: int) -> tuple[Life, ...]:
        """Return what is in the arena during a run, largest first."""
        found = (life for life in self.lives if life.first <= run <= life.last)
        return tuple(sorted(found, key=lambda life: (-life.bytes, life.first)))

    def lines(self, run: int) -> tuple[tuple[str, int, int], ...]:
        """Return (line of the model, bytes, tensors) of what is in the arena, largest first."""
        sums: dict[str, list[int]] = {}
        for life in self.alive(run):
            line = life.source or _WITHOUT_LINE.get(life.made_by, life.made_by)
            sums.setdefault(line, []).append(life.bytes)
        ordered = sorted(sums.items(), key=lambda entry: -sum(entry[1]))
        return tuple((line, sum(sizes), len(sizes)) for line, sizes in ordered)

    @functools.cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """What is evicted and regenerated, by the beginning of the eviction."""
        last: dict[int, Life] = {}
        found = []
        for life in self.lives:
            before = last.get(life.tensor)
            if before is not None:
                facts = (life.name, life.source, life.bytes, before.last, life.first)
                found.append(Gap(*facts, life.reloaded))
            last[life.tensor] = life
        return tuple(sorted(found, key=lambda gap: gap.first))


def timeline_of(
    session: Session, facts: ArenaFacts, shape: Mapping[str, int], budget_bytes: int | None,
    kinds: Sequence[str], dims: Sequence[SymbolicDim],
) -> Timeline:  # fmt: skip
    """Lay a plan out over its runs.

    ``kinds``: the kind of each tensor that the caller passes, in order.
    """
    metadata = session.metadata
    graph = session.planner_graph([shape[name] for name in metadata.dims])
    runs: list[KernelRun] = []
    start, seen = 0, set()
    needed: dict[int, int] = {}  # when the transfers end that a run waits for
    for transfer in facts.transfers:
        needed[transfer.wait] = max(transfer.end_ns, needed.get(transfer.wait, 0))
    for position, kernel in enumerate(facts.sequence):
        start = max(start, needed.get(position, 0))
        entry, op = metadata.kernels[kernel], graph.ops[kernel]
        time_ns = op.rerun_ns if kernel in seen and op.rerun_ns >= 0 else op.time_ns
        runs.append(KernelRun(entry.name, entry.source, start, time_ns, kernel in seen))
        start += time_ns
        seen.add(kernel)
    forward = _ancestors_of_loss(metadata)
    makers = {t: k for k, entry in enumerate(metadata.kernels) for t in entry.outputs}
    begins = {(version.offset, version.created, version.tensor) for version in facts.versions}
    lives = []
    reloaded = {transfer.version for transfer in facts.transfers if transfer.is_read}
    for index, version in enumerate(facts.versions):
        if version.tensor < 0:
            maker, name, category = -1 - version.tensor, "workspace", "workspace"
            size = graph.ops[maker].workspace
        else:
            maker, size = makers[version.tensor], graph.sizes[version.tensor]
            name = metadata.tensors[version.tensor].name
            category = "activations" if maker in forward else "gradients"
        last = facts.sequence[version.last_use]
        overwritten = any(
            old == version.tensor and (version.offset, version.last_use, new) in begins
            for old, new in graph.ops[last].inplace
        )
        kernel = metadata.kernels[maker]
        lives.append(
            Life(
                tensor=version.tensor,
                name=name,
                category=category,
                bytes=size,
                offset=version.offset,
                first=version.created,
                last=version.last_use - overwritten,
                made_by=kernel.name,
                source=kernel.source,
                reloaded=index in reloaded,
            )
        )
    transfers = []
    for transfer in facts.transfers:
        tensor = facts.versions[transfer.version].tensor
        transfers.append(
            TransferRun(
                name=metadata.tensors[tensor].name,
                source=metadata.kernels[makers[tensor]].source,
                bytes=graph.sizes[tensor],
                is_read=transfer.is_read,
                start_ns=transfer.begin_ns,
                time_ns=transfer.end_ns - transfer.begin_ns,
            )
        )
    constant = _constant_bytes(metadata, facts, shape, kinds, dims)
    return Timeline(
        *(dict(shape), budget_bytes, facts.peak_bytes, facts.arena_bytes),
        *(tuple(runs), tuple(lives), tuple(transfers), constant),
    )


def _constant_bytes(
    metadata: PlanMetadata, facts: ArenaFacts, shape: Mapping[str, int], kinds: Sequence[str],
    dims: Sequence[SymbolicDim],
) -> dict[str, int]:  # fmt: skip
    graph = graph_of_table(metadata, dims).at(shape)
    sizes = graph.numbers()
    found: dict[str, int] = {}
    for tensor, kind in zip(graph.inputs, kinds, strict=False):
        if category := _CATEGORY_OF_KIND.get(kind):
            found[category] = found.get(category, 0) + sizes[tensor]
    state = _CATEGORY_OF_KIND["state"]
    if facts.offloaded_state_bytes:
        found[state] -= facts.offloaded_state_bytes
    found["constants"] = facts.resident_bytes - sum(found.values())
    found[state] = found.get(state, 0) + facts.state_window_bytes
    found["outputs"] = facts.escaping_bytes
    found["library buffers"] = facts.library_bytes
    found["offload buffer"] = facts.buffer_bytes
    return found


def _ancestors_of_loss(metadata: PlanMetadata) -> frozenset[int]:
    """Return the kernels that the first escaping output is computed by; all without one."""
    escaping = (metadata.views[view].tensor for view in metadata.outputs)
    loss = next((t for t in escaping if metadata.tensors[t].storage is Storage.ESCAPING), None)
    if loss is None:
        return frozenset(range(len(metadata.kernels)))
    needed, found = {loss}, set()
    for index, kernel in reversed(list(enumerate(metadata.kernels))):
        if needed & set(kernel.outputs):
            found.add(index)
            needed |= set(kernel.inputs)
    return frozenset(found)


def source_lines(timelines: Iterable[Timeline]) -> frozenset[str]:
    """Return the lines of the model, ``"file:line"``, that some timelines name."""
    return frozenset(run.source for timeline in timelines for run in timeline.runs if run.source)
