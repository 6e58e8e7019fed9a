"""Keep what a capture led to, so that a second start traces no gradients.

Beside a program (:mod:`.compile_cache`) lies a record of every capture that led to it, named by the
program and by a hash of what the capture depends on: the fingerprint of the exported model, the
target, the versions of the libraries, the processor and the package's own sources.  A record says
what the functions of the program take and return; it is checked and written like a program, and
goes with it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import tvm

from relax_disc.errors import ArtefactError
from relax_disc.frontend.capture.state.outer import Outer
from relax_disc.frontend.spec import CapturedStep
from relax_disc.pipeline import PipelineOptions
from relax_disc.training.cache import artefact
from relax_disc.training.cache.artefact_spec import describe_captured, restore_captured
from relax_disc.training.cache.compile_cache import (
    RECORD_SUFFIX,
    CachedProgram,
    load_program,
    program_folder,
    surroundings,
)

_logger = logging.getLogger(__name__)


def recall(
    fingerprint: str | None,
    target: tvm.target.Target,
    outer: Outer,
    options: PipelineOptions | None = None,
) -> tuple[list[CapturedStep], CachedProgram] | None:
    """Find what a capture would give, and its program.

    The captured functions without their module, which refer to the tensors given, and their code;
    None where the cache holds nothing that can be used, or without a fingerprint.
    """
    if fingerprint is None:
        return None
    if options is not None and options.dump_to is not None:
        return None  # its files are to be written
    key = _key(fingerprint, target, options)
    for record in sorted(program_folder().glob(f"*-{key}{RECORD_SUFFIX}")):
        try:
            header, _ = artefact.read(record)
            functions = [restore_captured(facts, outer) for facts in header["functions"]]
        except ArtefactError as error:
            _logger.warning("tracing again: %s", error)
            continue
        built = load_program(record.name.removesuffix(f"-{key}{RECORD_SUFFIX}"), target)
        if built is not None:
            return functions, built
    return None


def remember(
    fingerprint: str | None,
    target: tvm.target.Target,
    functions: Sequence[CapturedStep],
    program: Path | None,
    options: PipelineOptions | None = None,
) -> None:
    """Write the record of a capture beside its program, unless that is not kept.

    A batch that cannot be written down (see `describe_captured`) leaves no record, nor does a disk
    that refuses.
    """
    if fingerprint is None or program is None:
        return
    path = program.with_name(f"{program.stem}-{_key(fingerprint, target, options)}{RECORD_SUFFIX}")
    try:
        described = [describe_captured(captured) for captured in functions]
        artefact.write(path, {"format": artefact.FORMAT, "functions": described}, {})
    except (ArtefactError, OSError) as error:
        _logger.info("the next start traces again: %s", error)


def _key(fingerprint: str, target: tvm.target.Target, options: PipelineOptions | None) -> str:
    facts = surroundings(target, options)
    return hashlib.sha256(f"{facts}\n{fingerprint}".encode()).hexdigest()
