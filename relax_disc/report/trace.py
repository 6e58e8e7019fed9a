"""The timeline as a trace of Chrome's format, for https://ui.perfetto.dev and chrome://tracing.

Counters tell live bytes by category, one track the kernels, one what is offloaded and reloaded, and
one the time that each evicted tensor is away.  Reference: Google, "Trace Event Format".
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from relax_disc.analysis.memory.timeline import Timeline

_KERNELS, _TRANSFERS, _PROCESS = 1, 2, 1


def events(timeline: Timeline) -> list[dict[str, Any]]:
    """List the events of a trace; times in microseconds, as the format wants them."""
    common = {"pid": _PROCESS, "tid": _KERNELS}
    found: list[dict[str, Any]] = [
        {**common, "ph": "M", "name": "process_name", "args": {"name": "training step (modelled)"}},
        {**common, "ph": "M", "name": "thread_name", "args": {"name": "kernels"}},
    ]
    for index, run in enumerate(timeline.runs):
        at = {**common, "ts": run.start_ns / 1e3}
        live = {name: row[index] for name, row in timeline.live_bytes.items()}
        found.append({**at, "ph": "C", "name": "live bytes", "args": live})
        category = "regenerate" if run.again else "kernel"
        name = f"regenerate {run.name}" if run.again else run.name
        span = {"ph": "X", "dur": run.time_ns / 1e3, "cat": category, "name": name}
        found.append({**at, **span, "args": {"line": run.source}})
    moving = {**common, "tid": _TRANSFERS}
    if timeline.transfers:
        found.append({**moving, "ph": "M", "name": "thread_name", "args": {"name": "transfers"}})
    for transfer in timeline.transfers:
        verb = "reload" if transfer.is_read else "offload"
        at = {"ts": transfer.start_ns / 1e3, "dur": transfer.time_ns / 1e3}
        span = {**moving, **at, "ph": "X", "cat": verb, "name": f"{verb} {transfer.name}"}
        found.append({**span, "args": {"bytes": transfer.bytes, "line": transfer.source}})
    for number, gap in enumerate(timeline.gaps):
        away = {**common, "cat": "evicted", "id": number, "name": f"evicted {gap.name}"}
        begin, end = timeline.runs[gap.first], timeline.runs[gap.last]
        facts = {"bytes": gap.bytes, "line": gap.source}
        start_us = (begin.start_ns + begin.time_ns) / 1e3
        found.append({**away, "ph": "b", "ts": start_us, "args": facts})
        found.append({**away, "ph": "e", "ts": end.start_ns / 1e3})
    return found


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a trace file.

    ``path``: ends in ``.json``, so that the viewers take it.
    """
    content = {"traceEvents": events(timeline), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(content))
