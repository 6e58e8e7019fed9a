"""Rows of results that are on the disk as soon as they are known, so that a part can go on."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Console

from benchmarks import record
from benchmarks.gpu.device import Device


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
    """

    def __init__(self, device: Device, part: str, seconds: float = 480.0) -> None:
        self._name, self._device = f"gpu_{device.name}_{part}", device
        self._until = time.monotonic() + seconds
        self._rows: dict[str, dict[str, Any]] = {}
        self._console = Console()
        path = record.RESULTS / f"{self._name}.json"
        if path.is_file():
            found = json.loads(path.read_text())
            if found["commit"] == record.commit():
                self._rows = {row["row"]: row for row in found["results"]}

    def wanted(self, row: str) -> bool:
        """Say whether a row is missing and there is time for it."""
        return row not in self._rows and time.monotonic() < self._until

    def add(self, row: str, **figures: Any) -> None:
        """Write a row."""
        self._rows[row] = {"row": row, **figures}
        self._console.print({k: v for k, v in self._rows[row].items() if k != "kernels"})
        settings = {"device": self._device.name, "target": str(self._device.target)}
        record.write_result(self._name, settings, list(self._rows.values()))
