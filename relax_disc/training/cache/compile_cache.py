"""Keep compiled programs between processes, so that a second start does not compile again.

A program's file is named by a hash of everything that its code depends on: the captured module,
the options, the target, the versions of the libraries, the processor, the number of threads and the
package's own sources.
It holds a checksum and a shared library; a damaged file counts as absent.  Files live in the
`programs` folder of the cache directory (`RELAX_DISC_CACHE`, else below the user's cache), appear
whole or not at all, and the least recently used ones go when they exceed `RELAX_DISC_CACHE_BYTES`
(2 GiB).  `RELAX_DISC_COMPILE_CACHE=0` switches the cache off.  Beside a program lie the times that
were measured of its kernels, one file for each kind of machine, and records of the captures that
led to it (:mod:`.capture_cache`).

Limits: two processes that miss the same program at once both compile it, and the last one's stays.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tvm

from relax_disc.bytes_text import parse_bytes
from relax_disc.errors import ArtefactError
from relax_disc.pipeline import PipelineOptions
from relax_disc.tir_kernels.tuning import database as tuning_database
from relax_disc.training.cache import artefact
from relax_disc.training.cache.artefact_check import processor, versions
from relax_disc.training.calibration import SUFFIX as CALIBRATION_SUFFIX
from relax_disc.training.calibration import cache_file
from relax_disc.vm_builtins import native, runtime
from relax_disc.vm_builtins.libraries import install as libraries

_logger = logging.getLogger(__name__)

_LIMIT_BYTES = 2 * 2**30
_DRAFT_SECONDS = 3600  # a draft older than this has no writer any more
_SUFFIX = ".program"
RECORD_SUFFIX = ".capture"
"""Of the records of captures (:mod:`.capture_cache`), which go with their program."""


@dataclass(frozen=True, slots=True)
class CachedProgram:
    """A program as the cache knows it."""

    executable: Any  # for `tvm.relax.VirtualMachine`
    library: bytes | None = None  # the code as a shared library; None when the cache is off
    path: Path | None = None  # its file; None when the cache is off

    def calibration_path(self, machine: str) -> Path | None:
        """Name the file of the program's calibration on a machine."""
        return None if self.path is None else cache_file(self.path.parent, self.path.stem, machine)


def enabled() -> bool:
    """Whether compiled programs are kept, as `RELAX_DISC_COMPILE_CACHE` says now."""
    return os.environ.get("RELAX_DISC_COMPILE_CACHE", "1") != "0"


def program_key(
    module: tvm.IRModule, target: tvm.target.Target, options: PipelineOptions | None
) -> str:
    """Hash everything that the code of a module depends on."""
    state = hashlib.sha256(surroundings(target, options).encode())
    state.update(tvm.ir.save_json(module).encode())
    return state.hexdigest()


def surroundings(target: tvm.target.Target, options: PipelineOptions | None) -> str:
    """Write down what the code depends on besides the module, as text."""
    chosen = options or PipelineOptions()
    tuned = tuning_database.load(target, chosen.tuning_database)
    facts: dict[str, Any] = {
        "target": str(target),
        # What a database says counts, not where it lies.
        "options": asdict(replace(chosen, dump_to=None, tuning_database=None)),
        "tuned": "" if tuned is None else tuned.digest(),
        "versions": versions(),
        "processor": processor(),
        # The order of the kernels follows from what library kernels work in (`ScheduleOps`).
        "threads": torch.get_num_threads(),
        "sources": _sources(),
    }
    return json.dumps(facts, sort_keys=True)


def program_folder() -> Path:
    """Name the folder of the programs, which may not exist yet."""
    return native.cache_directory() / "programs"


def load_program(name: str, target: tvm.target.Target) -> CachedProgram | None:
    """Load a program that is there, ready to run, and mark it as used.

    ``name`` is a `program_key`; None where there is none that can be used.
    """
    path = program_folder() / f"{name}{_SUFFIX}"
    library = _look_up(path)
    if library is None:
        return None
    runtime.load()
    libraries.install(target.kind.name)
    return CachedProgram(artefact.load_library(library), library, path)


def build_cached(
    module: tvm.IRModule,
    target: tvm.target.Target,
    options: PipelineOptions | None,
    build: Callable[[], Any],
) -> CachedProgram:
    """Return a module's code from the cache, or build it and keep it.

    With `PipelineOptions.dump_to` the cache is left alone, so that the files are written.
    """
    if not enabled() or (options is not None and options.dump_to is not None):
        return CachedProgram(build())
    _limit_bytes()  # or what is wrong with it is told when all has been compiled
    name = program_key(module, target, options)
    known = load_program(name, target)
    if known is not None:
        return known
    folder = program_folder()
    path = folder / f"{name}{_SUFFIX}"
    executable = build()
    try:
        library = artefact.export_library(executable)
    except ArtefactError as error:  # without a compiler there is no shared library
        _logger.warning("the compiled program is not kept in %s: %s", folder, error)
        return CachedProgram(executable)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        artefact.write(path, {"format": artefact.FORMAT}, {"library": library})
        _trim(folder, keep=path)
    except OSError as error:  # a full or read-only disk must not stop the training
        _logger.warning("the compiled program is not kept in %s: %s", folder, error)
    # The executable itself would make machine code once more, for this process alone.
    return CachedProgram(artefact.load_library(library), library, path)


def _look_up(path: Path) -> bytes | None:
    """Read a program and mark it as used; None where there is none that can be used."""
    if not path.exists():
        return None
    try:
        _, parts = artefact.read(path)
    except ArtefactError as error:
        _logger.warning("compiling again: %s", error)
        return None
    with contextlib.suppress(OSError):  # another process may have removed it, or disallows this
        os.utime(path)
    return parts["library"]


def _limit_bytes() -> int:
    """Return how large the programs may be altogether.

    Raises `InputMismatchError`: `RELAX_DISC_CACHE_BYTES` is no number of bytes.
    """
    text = os.environ.get("RELAX_DISC_CACHE_BYTES")
    return _LIMIT_BYTES if text is None else parse_bytes(text, name="RELAX_DISC_CACHE_BYTES")


def _trim(folder: Path, keep: Path) -> None:
    """Remove the least recently used programs beyond the bound, never the one just written.

    Removes the drafts that killed processes left behind, too.
    """
    for draft in folder.glob(f".*{_SUFFIX}.*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > _DRAFT_SECONDS:
                draft.unlink(missing_ok=True)
    limit = _limit_bytes()
    found = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another process trims too
            facts = path.stat()
            found.append((path != keep, -facts.st_mtime_ns, path.name, facts.st_size, path))
    total = 0
    for is_other, _, _, size, path in sorted(found):
        total += size
        if is_other and total > limit:
            path.unlink(missing_ok=True)
            for suffix in (CALIBRATION_SUFFIX, RECORD_SUFFIX):
                for companion in folder.glob(f"{path.stem}-*{suffix}"):
                    companion.unlink(missing_ok=True)


@functools.cache
def _sources() -> str:
    """Hash of the package's own sources, which decide what code is generated."""
    root = Path(__file__).resolve().parents[2]
    state = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cc", ".h"):
            content = path.read_bytes()
            name = path.relative_to(root).as_posix().encode()
            state.update(name + b"\0" + len(content).to_bytes(8, "little") + content)
    return state.hexdigest()
