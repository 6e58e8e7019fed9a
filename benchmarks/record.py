"""Write what was measured together with what it was measured on.

A figure without its commit and machine cannot be compared with another one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
_PACKAGES_IN = r"[^\s\"':]*/site-packages/"
_FOLDERS = re.compile(  # the checkout's own path may have spaces
    rf"{re.escape(str(RESULTS.parents[1]))}/({_PACKAGES_IN})?|/{_PACKAGES_IN}"
)
_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "torch")


def commit() -> str:
    """Hash of the checkout's commit, with `+changes` when files differ.

    Without git it is what `RELAX_DISC_COMMIT` says, or `unknown`.  Results do not count: a run that
    writes several would be at its commit for the first alone.
    """
    try:
        described = _git("describe", "--always", "--abbrev=12", "--exclude=*")
        results = RESULTS.relative_to(RESULTS.parents[1]).as_posix()
        changed = _git("status", "--porcelain", "-uno", "--", ".", f":(exclude){results}")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("RELAX_DISC_COMMIT", "unknown")
    return described + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    root = RESULTS.parents[1]
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Describe processor, memory, system and the versions of what does the work."""
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }


def write_result(name: str, settings: Mapping[str, Any], results: Any) -> Path:
    """Write `results/<name>.json` and return its path; an older file of that name is replaced."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {
        "benchmark": name,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": dict(settings),
        "results": results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def without_folders(text: str) -> str:
    """Name files from the checkout or site-packages on; where those lie is one machine's."""
    return _FOLDERS.sub("", text)


def _field(path: str, key: str) -> str | None:
    """Value of the first `key : value` line of a file of the kernel's; None if there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
