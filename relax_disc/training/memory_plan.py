"""What a step will need at a shape, in bytes, known before it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from relax_disc.analysis.memory.timeline import Timeline
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.bytes_text import format_bytes
from relax_disc.errors import ShapeRangeError


@dataclass(frozen=True, slots=True)
class WholeGradient:
    """A large gradient that is never made by rows, so that budgets must have room for all of it.

    Attributes
    ----------
    parameter : str
        Full name in the model.
    size_bytes : int
        What it takes.
    reason : str
        What makes it whole, or reads it whole.
    """

    parameter: str
    size_bytes: int
    reason: str

    def __str__(self) -> str:
        return (
            f"the gradient of {self.parameter} ({format_bytes(self.size_bytes)}) is not made by "
            f"rows: {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory and modelled time of one step at one shape under one budget.

    Attributes
    ----------
    shape : mapping of str to int
        The value of each dim.
    budget_bytes : int or None
        The budget that the plan was made for; None where there is none.
    fits : bool
        Whether the step runs within the budget.  If not, the figures of memory describe the least
        plan that was found, and those of time and of what runs again say nothing.
    peak_bytes : int
        All device memory of the step: resident + arena + escaping + offload buffer + state window.
    resident_bytes : int
        Parameters, buffers, optimizer state, persistent gradients, batch and constants.
    state_bytes : int
        What parameters, buffers and optimizer state take of it: a part of ``resident_bytes``, and
        the window.
    arena_bytes : int
        Highest end offset of the planned arena.
    live_peak_bytes : int
        Most live tensor bytes inside the arena; the arena can be no smaller.
    escaping_bytes : int
        Outputs that live on after the call.
    workspace_bytes : int
        Most that a library kernel needs beside its arguments, in the arena while it runs.
    library_bytes : int
        Most that a library takes by itself beside the arena: MKL's packing buffers, where it
        multiplies float32 (``docs/dependencies.md``); on a GPU cuBLAS's workspace, and the most
        that PyTorch's kernels take from its allocator while one of them runs (``docs/cuda.md``).
    unbounded_calls : tuple of str
        Library functions that take more than that, as much as nobody can tell before: cuDNN's
        convolutions on a GPU.
    time_ratio : float
        Modelled time over the modelled time without a budget; 1.0 = nothing is computed again, and
        no kernel waits for a transfer.
    evicted : tuple of str
        Names of the kernels that run again, in the order in which they do.
    offloaded : tuple of str
        Names of the kernels whose results are written to `offload_to` and read back, in order.
    offloaded_bytes, reloaded_bytes : int
        What is written there, and what is read back.
    offload_space_bytes : int
        What they take there at most: of the file, or of pinned memory of the host, one buffer.
    offload_buffer_bytes : int
        Memory that these transfers take beside it, a part of the peak.
    offloaded_state_bytes : int
        Of the optimizer's state, in a file (``offload="optimizer"``).
    state_window_bytes : int
        The most of those that are in memory at once.
    stall_ratio : float
        Part of ``time_ratio`` in which kernels wait for transfers.
    by_rows : bool
        Whether the largest gradients are made and used by rows, since the plain way does not fit.
    whole_gradients : tuple of WholeGradient
        Gradients of vocabulary heads, embedding tables and one or two parameters that are far
        larger than all others, of which that cannot be done, whatever the budget.  Empty on a GPU,
        and with ``PipelineOptions(split_gradients=False)``, where it is never done.
    """

    shape: Mapping[str, int]
    budget_bytes: int | None
    fits: bool
    peak_bytes: int
    resident_bytes: int
    state_bytes: int
    arena_bytes: int
    live_peak_bytes: int
    escaping_bytes: int
    workspace_bytes: int
    library_bytes: int
    unbounded_calls: tuple[str, ...]
    time_ratio: float
    evicted: tuple[str, ...]
    offloaded: tuple[str, ...]
    offloaded_bytes: int
    reloaded_bytes: int
    offload_space_bytes: int
    offload_buffer_bytes: int
    offloaded_state_bytes: int
    state_window_bytes: int
    stall_ratio: float
    by_rows: bool
    whole_gradients: tuple[WholeGradient, ...]
    _least_bytes: Callable[[], int] = field(repr=False, compare=False)
    _timeline: Callable[[], Timeline] = field(repr=False, compare=False)

    @property
    def least_bytes(self) -> int:
        """The least budget that the planner finds for this shape, whatever the present one is.

        What `MemoryBudgetError` names too.  Searched for when it is first read, which takes many
        times as long as the plan, for the step as it is then.
        """
        return self._least_bytes()

    @property
    def activation_peak_bytes(self) -> int:
        """The peak without parameters, buffers and optimizer state."""
        return self.peak_bytes - self.state_bytes

    @property
    def timeline(self) -> Timeline:
        """The memory of the call kernel by kernel, laid out anew at each use."""
        return self._timeline()

    def plot(self, path: str | os.PathLike[str], *, before: MemoryPlan | None = None) -> None:
        """Draw live bytes over the step, by category, with the budget and what is evicted.

        Parameters
        ----------
        path : path-like
            The picture; its ending chooses the format (``.png``, ``.svg``, ``.pdf``).
        before : MemoryPlan, optional
            Another plan of the shape, drawn above on the same scale: without a budget, say.

        Raises
        ------
        ImportError
            matplotlib is not installed: ``pip install "relax-disc[plot]"``.
        """
        from relax_disc.report.picture import draw

        plans = [self] if before is None else [before, self]
        draw([plan.timeline for plan in plans], path)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline for https://ui.perfetto.dev or chrome://tracing."""
        from relax_disc.report.trace import write_trace

        write_trace(self.timeline, path)

    def write_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as a memory snapshot for https://pytorch.org/memory_viz."""
        from relax_disc.report.snapshot import write_snapshot

        write_snapshot(self.timeline, path)

    def write_html(self, path: str | os.PathLike[str], *, before: MemoryPlan | None = None) -> None:
        """Write a report in one file, which a browser opens offline; parameters as of `plot`."""
        from relax_disc.report.page import write_page

        plans = [self] if before is None else [before, self]
        write_page([plan.timeline for plan in plans], path)

    def __str__(self) -> str:
        dims = ", ".join(f"{name}={value}" for name, value in self.shape.items())
        limit = self.budget_bytes
        budget = "no budget" if limit is None else f"budget {format_bytes(limit)}"
        memory = (
            f"{dims}: peak {format_bytes(self.peak_bytes)} (activations "
            f"{format_bytes(self.activation_peak_bytes)}), "
        )
        if not self.fits:
            needed = f"{memory}{budget}; DOES NOT FIT, needs {format_bytes(self.least_bytes)}"
            return "; ".join([needed, *map(str, self.whole_gradients)])
        reloads = f"{format_bytes(self.reloaded_bytes)} reloaded, " if self.reloaded_bytes else ""
        return (
            f"{memory}time x{self.time_ratio:.3f}, {len(self.evicted)} recomputations, "
            f"{reloads}{budget}"
        )


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What the last call of a step used, counted while it ran.

    Attributes
    ----------
    shape : mapping of str to int
        The value of each dim.
    budget_bytes : int or None
        The budget that held.
    planned_peak_bytes, peak_bytes : int
        As promised at entry, and as counted from the memory that kernels were given.
    resident_bytes, state_bytes, arena_bytes, escaping_bytes, workspace_bytes : int
        As in `MemoryPlan`.
    held_bytes : int
        What stays allocated between calls.
    recomputations : int
        Kernel executions beyond one for each kernel.
    offloaded_bytes, reloaded_bytes : int
        Written to `offload_to`, and read back.
    waited_ns : int
        Time that kernels waited for these transfers, and those of the state.
    offloaded_state_bytes, state_window_bytes : int
        As in `MemoryPlan`; the window as counted.
    finished : bool
        False if the call failed half-way.
    """

    shape: Mapping[str, int]
    budget_bytes: int | None
    planned_peak_bytes: int
    peak_bytes: int
    resident_bytes: int
    state_bytes: int
    arena_bytes: int
    escaping_bytes: int
    workspace_bytes: int
    held_bytes: int
    recomputations: int
    offloaded_bytes: int
    reloaded_bytes: int
    waited_ns: int
    offloaded_state_bytes: int
    state_window_bytes: int
    finished: bool

    @property
    def activation_peak_bytes(self) -> int:
        """The peak without parameters, buffers and optimizer state."""
        return self.peak_bytes - self.state_bytes


def bounded_dim(dims: Sequence[SymbolicDim], name: str) -> SymbolicDim:
    """Find a dim that has an upper bound.

    Raises `ShapeRangeError`: there is none of this name.
    """
    found = next((dim for dim in dims if dim.name == name), None)
    if found is None or found.last is None:
        names = ", ".join(dim.name for dim in dims)
        raise ShapeRangeError(f"largest() needs one bounded dim of {names}; got {name!r}")
    return found


_LOOK_AHEAD = 4
"""Sizes; seen: one between two that fit, of a Llama's lengths 14 to 29 in a batch of 2."""


def largest_that_fits(fits: Callable[[int], bool], dim: SymbolicDim) -> int:
    """Return the greatest size of a bounded dim that fits, or 0 if none does.

    Peaks grow with a dim almost always, but a plan is a heuristic's answer, and a size that falls
    badly into chunks can need more than the next ones do.  So the boundary found by bisection is
    followed upwards while one of the next `_LOOK_AHEAD` sizes still fits.

    ``dim``: with an upper bound.
    """
    lower, upper, step = dim.first, dim.last or 0, dim.divisor
    low, high = -(-lower // step), upper // step
    if low > high or not fits(low * step):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle - 1
    place, last = low, upper // step
    while place < min(low + _LOOK_AHEAD, last):
        place += 1
        if fits(place * step):
            low = place
    return low * step
