"""Rows of results that are on the disk as soon as they are known, so that a part can go on."""

from __future__ import annotations

import json
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.gpu.device import Device

LOST = 75
"""Exit status of a process whose device answers nothing any more: another one can go on."""

_LINE = 600
_MOST_BEGINNINGS = 2
"""Of a row that ends its process; then it is left out."""


class Rows:
    """The file of one part; what this commit has measured already is not measured again.

    Parameters
    ----------
    device : Device
        Its name is a part of the file's.
    part : str
        Likewise.
    seconds : float
        How long new rows may take from now on, all together; a row that has begun ends.
    retry : bool
        Measure what has failed again.
    copy_to : Path or None
        A folder that gets a copy of the file, row by row.
    """

    def __init__(
        self,
        device: Device,
        part: str,
        seconds: float = 480.0,
        *,
        retry: bool = False,
        copy_to: Path | None = None,
    ) -> None:
        self._name, self._device = f"gpu_{device.name}_{part}", device
        self._until = time.monotonic() + seconds
        self._rows: dict[str, dict[str, Any]] = {}
        self._lock, self._copy_to = threading.Lock(), copy_to
        path = record.RESULTS / f"{self._name}.json"
        if path.is_file():
            found = json.loads(path.read_text())
            if found["commit"] == record.commit():
                self._rows = {row["row"]: row for row in found["results"]}
        if retry:
            self._rows = {
                name: row
                for name, row in self._rows.items()
                if not {"failed", "begun"} & row.keys()
            }

    def wanted(self, row: str) -> bool:
        """Say whether a row is missing and there is time for it."""
        known = self._rows.get(row)
        is_missing = known is None or known.get("begun", _MOST_BEGINNINGS) < _MOST_BEGINNINGS
        return is_missing and time.monotonic() < self._until

    def add(self, row: str, **figures: Any) -> None:
        """Write a row."""
        line = f"{row}: {json.dumps(figures)}"
        print(line if len(line) <= _LINE else f"{line[:_LINE]} ...", flush=True)
        self._write(row, figures)

    def measure(self, row: str, run: Callable[[], dict[str, Any]]) -> None:
        """Add what ``run`` returns if the row is wanted; its failure is a row, and the next comes.

        Raises `SystemExit`: the device answers nothing after a failure.
        """
        if not self.wanted(row):
            return
        # So that a row that ends this process is known.
        self._write(row, {"begun": self._rows.get(row, {}).get("begun", 0) + 1})
        try:
            figures = run()
        except Exception as error:
            figures = {
                "failed": f"{type(error).__name__}: {error}"[:2000],
                "where": traceback.format_exc(limit=-4)[-2000:],
            }
        self.add(row, **figures)
        if "failed" in figures and not self._device.answers():
            raise SystemExit(LOST)

    def _write(self, row: str, figures: dict[str, Any]) -> None:
        settings = {"device": self._device.name, "target": str(self._device.target)}
        with self._lock:
            self._rows[row] = {"row": row, **figures}
            path = record.write_result(self._name, settings, list(self._rows.values()))
            if self._copy_to is not None:
                shutil.copy(path, self._copy_to)
