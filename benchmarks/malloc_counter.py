"""Measure the memory of a process from inside, independently of what any library reports.

`preload_environment` builds the counter (`malloc_counter.c`) and says how to start a process with
it; in that process `MallocCounter` reads it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from relax_disc.vm_builtins.native import cache_directory

_SOURCE = Path(__file__).with_suffix(".c")


def preload_environment() -> dict[str, str]:
    """Environment variables under which a new process counts its memory (Linux with glibc).

    Raises
    ------
    RuntimeError
        If there is no C compiler, or it fails; the message holds the compiler's.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("counting memory needs a C compiler: install gcc, or set CC")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = cache_directory() / f"malloc_counter-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(partial), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        partial.replace(library)
    earlier = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{earlier}" if earlier else str(library)}


class MallocCounter:
    """The counters of this process, which must have been started with `preload_environment`."""

    def __init__(self) -> None:
        program = ctypes.CDLL(None)
        try:
            self._live = program.malloc_counter_live
            self._peak = program.malloc_counter_peak
            self._reset = program.malloc_counter_reset_peak
        except AttributeError:
            raise RuntimeError("this process was started without the malloc counter") from None
        self._live.restype = self._peak.restype = ctypes.c_long

    def live_bytes(self) -> int:
        """Bytes that are held now."""
        return self._live()

    def peak_bytes(self) -> int:
        """Most bytes held at once since `reset_peak`."""
        return self._peak()

    def reset_peak(self) -> None:
        """Begin a new measurement."""
        self._reset()
