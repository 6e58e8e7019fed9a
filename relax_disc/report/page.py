"""The timeline as one HTML file that needs nothing else: no network, no server."""

from __future__ import annotations

import json
import linecache
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relax_disc.analysis.memory.timeline import Timeline, source_lines
from relax_disc.report.picture import COLOURS, title

_TEMPLATE = Path(__file__).with_name("page.html")
_MARK = "/*DATA*/null"


def write_page(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Write the page.

    ``timelines``: one, or a before and an after, drawn on one scale.
    """
    data = {
        "timelines": [_plain(timeline) for timeline in timelines],
        "colours": COLOURS,
        "code": {line: code_of(line) for line in sorted(source_lines(timelines))},
    }
    # "<" is written as JSON allows, so that no name or line of code can end the script.
    text = json.dumps(data).replace("<", "\\u003c")
    Path(path).write_text(_TEMPLATE.read_text().replace(_MARK, text), encoding="utf-8")


def _plain(timeline: Timeline) -> dict[str, Any]:
    return {
        "title": title(timeline),
        "budget": timeline.budget_bytes,
        "peak": timeline.peak_bytes,
        "peakStep": timeline.peak_step,
        "runs": [asdict(run) for run in timeline.runs],
        "live": timeline.live_bytes,
        "lives": [asdict(life) for life in timeline.lives],
        "gaps": [asdict(gap) for gap in timeline.gaps],
    }


def code_of(line: str) -> str:
    """Return the text of a line ``"file:line"``; empty where the file is not here."""
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdigit() else ""
