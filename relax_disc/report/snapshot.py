"""The timeline as a memory snapshot of PyTorch's, for https://pytorch.org/memory_viz.

That viewer, and `torch.cuda._memory_viz`, read what ``torch.cuda.memory._dump_snapshot`` writes: a
pickle of lists, dicts, numbers and text alone, in which allocations name the lines that made them.
One segment is the arena, one for each category what stays from the beginning to the end.
Reference: PyTorch, "Understanding CUDA Memory Usage".
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from relax_disc.analysis.memory.timeline import Life, Timeline

_PROTOCOL = 4  # the newest that the viewer reads
_BASE = 1 << 32


def snapshot(timeline: Timeline) -> dict[str, Any]:
    """Lay the timeline out as a snapshot of device 0; times in microseconds, modelled."""
    segments: list[dict[str, Any]] = []
    trace: list[dict[str, Any]] = []
    address = _BASE
    for category, size in timeline.constant_bytes.items():
        block = {"size": size, "requested_size": size, "address": address, "frames": []}
        blocks = [{**block, "state": "active_allocated"}]
        segments.append(_segment(address, size, blocks))
        trace.append(_event("alloc", address, size, 0, [_frame(category, "")]))
        address += _rounded(size)
    active: dict[int, Life] = {}  # by offset
    starts: dict[int, list[Life]] = {}
    for life in timeline.lives:
        starts.setdefault(life.first, []).append(life)
    for number, run in enumerate(timeline.runs):
        now = run.start_ns // 1000

        def free(life: Life, now: int = now) -> None:
            del active[life.offset]
            for action in ("free_requested", "free_completed"):
                trace.append(_event(action, address + life.offset, life.bytes, now, []))

        for life in starts.get(number, ()):
            for old in [old for old in active.values() if _overlap(old, life)]:
                free(old)  # it is written over in place
            active[life.offset] = life
            frames = [_frame(f"{life.name} of {life.made_by} ({life.category})", life.source)]
            trace.append(_event("alloc", address + life.offset, life.bytes, now, frames))
        for life in [life for life in active.values() if life.last <= number]:
            free(life)
    if timeline.arena_bytes:
        blocks = [{"size": timeline.arena_bytes, "requested_size": 0, "state": "inactive"}]
        segments.append(_segment(address, timeline.arena_bytes, blocks))
    return {"segments": segments, "device_traces": [trace]}


def write_snapshot(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a snapshot file.

    ``path``: ends in ``.pickle`` by custom.
    """
    Path(path).write_bytes(pickle.dumps(snapshot(timeline), _PROTOCOL))


def _overlap(one: Life, other: Life) -> bool:
    return one.offset < other.offset + other.bytes and other.offset < one.offset + one.bytes


def _rounded(size: int) -> int:
    return -(-size // 512) * 512


def _segment(address: int, size: int, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _event(action: str, address: int, size: int, now: int, frames: list[Any]) -> dict[str, Any]:
    place = {"action": action, "addr": address, "size": size, "stream": 0}
    return {**place, "time_us": now, "frames": frames}


def _frame(name: str, source: str) -> dict[str, Any]:
    file, _, line = source.rpartition(":")
    return {"name": name, "filename": file, "line": int(line) if line.isdigit() else 0}
