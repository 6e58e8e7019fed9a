"""What tuning found, by kernel, in a JSON file that compiling reads.

A database is for one target, number of threads, and version of TVM and of this package: elsewhere
the same decisions may be slower.  The user's own lies in the cache directory, one file for each of
those.  Limits: one process writes at a time; the last one's file stays whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import Target

from relax_disc.errors import ArtefactError
from relax_disc.vm_builtins import native

_logger = logging.getLogger(__name__)

FORMAT = 1
USER = "user"
"""What names the user's own database in `PipelineOptions.tuning_database`."""


@dataclass(frozen=True, slots=True)
class TuningDatabase:
    """Decisions for kernels, and where they hold.

    ``environment``: target, threads and versions, as `environment` tells them. ``kernels``: by
    `kernel_key`: ``name``, ``trace`` (of MetaSchedule, as JSON; None: the rule is better),
    ``from`` (a parameter and its elements, from which on the trace is better; None: always),
    ``reason`` and ``measured`` (a list, one entry for each shape).
    """

    environment: Mapping[str, Any]
    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def decisions(self) -> dict[str, dict[str, Any]]:
        """Where a trace is better than the rule: the trace and from which size on, by key."""
        return {
            key: {"trace": each["trace"], "from": each["from"]}
            for key, each in self.kernels.items()
            if each["trace"] is not None
        }

    def digest(self) -> str:
        """Hash what a compiled program depends on; empty where no rule was beaten."""
        found = self.decisions()
        text = json.dumps(found, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest() if found else ""

    def with_kernel(self, key: str, entry: Mapping[str, Any]) -> TuningDatabase:
        """Return the database with one more entry, in place of what was there."""
        return TuningDatabase(self.environment, {**self.kernels, key: entry})

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT,
            "environment": dict(self.environment),
            "kernels": dict(sorted(self.kernels.items())),
        }
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(content, indent=1))
        draft.replace(path)


def kernel_key(kernel: tirx.PrimFunc) -> str:
    """Name a kernel by its structure: dims, constants and types, not the names of dims."""
    return f"{tvm_ffi.structural_hash(kernel) % 2**64:016x}"


def environment(target: Target) -> dict[str, Any]:
    """Tell what decisions hold for: target (not its host), threads of a processor, versions."""
    from relax_disc import __version__  # the package above imports this module

    facts = {key: value for key, value in dict(target.export()).items() if key != "host"}
    return {
        "target": {key: str(value) for key, value in sorted(facts.items())},
        "threads": torch.get_num_threads() if target.kind.name == "llvm" else None,
        "versions": {"relax_disc": __version__, "tvm": str(tvm.__version__)},
    }


def user_path(target: Target) -> Path:
    """Name the file of the user's own database for a target here, which may not exist."""
    facts = json.dumps(environment(target), sort_keys=True)
    folder = native.cache_directory() / "tuning"
    return folder / f"{target.kind.name}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"


def read(path: Path) -> TuningDatabase:
    """Read a file.

    Raises `ArtefactError`: it is not there, damaged or of another format.
    """
    try:
        modified = path.stat().st_mtime_ns
    except OSError as error:
        raise ArtefactError(f"there is no tuning database {path}: {error.strerror}") from error
    return _read(path, modified)


@lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> TuningDatabase:
    del modified  # a file that was written anew is read anew
    try:
        content = json.loads(path.read_text())
        made_by = content["format"]
        found = TuningDatabase(content["environment"], content["kernels"])
        found.digest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(
            f"{path} is no tuning database ({type(error).__name__}: {error}); remove it and run "
            "relax-disc tune again."
        ) from error
    if made_by != FORMAT:
        raise ArtefactError(f"{path} has format {made_by}, this version reads {FORMAT}.")
    return found


def load(target: Target, chosen: str | os.PathLike[str] | None) -> TuningDatabase | None:
    """Find the database for a compilation.

    ``target``: what is compiled for. ``chosen``: ``"user"``: the user's own, if there is one that
    can be read; for processors alone, because no times of other devices are measured yet. None:
    none.

    Raises `ArtefactError`: a file that was named is missing, damaged, or made for another target,
    number of threads or version; names what differs.
    """
    if chosen is None:
        return None
    if chosen != USER:
        path = Path(chosen)
        found = read(path)
        check(path, found, target)
        return found
    if target.kind.name != "llvm":
        return None
    path = user_path(target)
    if not path.exists():
        return None
    try:
        return read(path)
    except ArtefactError as error:
        _logger.warning("kernels are compiled without tuning: %s", error)
        return None


def check(path: Path, database: TuningDatabase, target: Target) -> None:
    """Refuse a database that was made elsewhere; raises `ArtefactError`."""
    here = environment(target)
    wrong = [
        f"{name} was {database.environment.get(name)}, here it is {value}"
        for name, value in here.items()
        if database.environment.get(name) != value
    ]
    if wrong:
        raise ArtefactError(
            f"{path} was tuned elsewhere: {'; '.join(wrong)}. Run relax-disc tune here, or leave "
            "tuning_database out."
        )
