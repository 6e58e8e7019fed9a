"""The timeline as a picture, by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from relax_disc.analysis.memory.timeline import CATEGORIES, Timeline
from relax_disc.bytes_text import format_bytes

_RESTING = ("#2f4b7c", "#4f6fa5", "#7f9bc8", "#a05195", "#b8c4d9", "#d3d8e0", "#9c8fb0")
_MOVING = ("#c9b6a0", "#8c8c8c", "#e0d4bd", "#f28e2b", "#59a14f")
COLOURS = dict(zip(CATEGORIES, (*_RESTING, *_MOVING), strict=True))
"""Of each category, in pictures and pages: what stays in blues and greys."""
_MOST_GAPS = 40
_MIB = 2**20


def draw(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Draw timelines one above the other, on one scale.

    ``timelines``: one, or a before and an after. ``path``: the picture; its ending chooses the
    format.

    Raises `ImportError`: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'a picture needs matplotlib: pip install "relax-disc[plot]"; write_html() and '
            "write_trace() need nothing"
        ) from error
    heights = [share for timeline in timelines for share in ((4, 1.4) if timeline.gaps else (4,))]
    figure = Figure(figsize=(10, 1.1 * sum(heights) + 0.6), layout="constrained")
    axes = iter(
        figure.subplots(len(heights), 1, height_ratios=heights, sharex=False, squeeze=False)[:, 0]
    )
    highest = max(max(t.peak_bytes, _near_budget(t)) for t in timelines)
    for timeline in timelines:
        _draw_live(next(axes), timeline, highest * 1.08 / _MIB)
        if timeline.gaps:
            _draw_gaps(next(axes), timeline)
    for each in figure.axes:
        each.set_xlim(0, max(_edges(timeline)[-1] for timeline in timelines))
    handles = {}
    for each in figure.axes:
        handles |= dict(zip(*each.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(
        [*handles.values()][::-1], [*handles][::-1], loc="outside right upper", frameon=False
    )
    figure.savefig(os.fspath(path), dpi=150)


def title(timeline: Timeline) -> str:
    """Say a timeline in one line."""
    dims = ", ".join(f"{name}={size}" for name, size in timeline.shape.items())
    budget = timeline.budget_bytes
    limit = "no budget" if budget is None else f"budget {format_bytes(budget)}"
    again = sum(run.again for run in timeline.runs)
    reloads = sum(transfer.is_read for transfer in timeline.transfers)
    parts = [dims, limit, f"peak {format_bytes(timeline.peak_bytes)}", f"{again} kernels run again"]
    parts += [f"{reloads} tensors reloaded"] if reloads else []
    return " · ".join(part for part in parts if part)


def _near_budget(timeline: Timeline) -> int:
    """Return the budget, or 0 where there is none or one so far that it would empty the picture."""
    budget = timeline.budget_bytes or 0
    return budget if budget < 2 * timeline.peak_bytes else 0


def _edges(timeline: Timeline) -> list[float]:
    """Begin of each run and the end of the last, in ms."""
    last = timeline.runs[-1]
    return [run.start_ns / 1e6 for run in timeline.runs] + [(last.start_ns + last.time_ns) / 1e6]


def _draw_live(axes: Any, timeline: Timeline, top: float) -> None:
    edges, live = _edges(timeline), timeline.live_bytes
    rows = [[size / _MIB for size in (*row, row[-1])] for row in live.values()]
    axes.stackplot(
        edges, rows, labels=list(live), colors=[COLOURS[name] for name in live], step="post"
    )
    if budget := _near_budget(timeline):
        axes.axhline(budget / _MIB, color="crimson", linestyle="--", label="budget")
    axes.set(ylim=(0, top), ylabel="MiB", xlabel="modelled time in ms")
    axes.set_title(title(timeline), loc="left", fontsize=10)


def _draw_gaps(axes: Any, timeline: Timeline) -> None:
    """Draw the largest evictions: a bar while the tensor is away, a mark where it comes back."""
    edges = _edges(timeline)
    largest = sorted(timeline.gaps, key=lambda gap: -gap.bytes * (gap.last - gap.first))
    shown = sorted(largest[:_MOST_GAPS], key=lambda gap: gap.first)
    for row, gap in enumerate(shown):
        start, end = edges[gap.first + 1], edges[gap.last]
        axes.barh(row, end - start, left=start, height=0.8, color="#f28e2b", alpha=0.35)
        colour = "#2f4b7c" if gap.reloaded else "crimson"
        axes.barh(row, edges[gap.last + 1] - end, left=end, height=0.8, color=colour)
    axes.set(yticks=[], ylabel=f"{len(shown)} evictions")
    axes.set_xlabel("evicted (pale) until computed again (red) or reloaded (blue)")
