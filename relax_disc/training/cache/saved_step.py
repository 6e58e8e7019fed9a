"""Save and load the programs of a step: what `TrainingStep.save` and `.load` are made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from relax_disc.frontend.spec import CapturedStep
from relax_disc.training.cache import artefact
from relax_disc.training.cache.artefact_check import (
    check_environment,
    check_model,
    check_optimizer,
    describe_model,
    describe_optimizer,
    processor,
    versions,
)
from relax_disc.training.cache.artefact_spec import (
    constant_parts,
    describe_captured,
    restore_captured,
    restore_outer,
)
from relax_disc.training.call.batch import device_of
from relax_disc.vm_builtins import runtime
from relax_disc.vm_builtins.libraries import install as libraries


@dataclass(frozen=True, slots=True)
class Program:
    """A captured function with its code."""

    captured: CapturedStep  # what it takes and returns
    executable: Any  # its code, for `tvm.relax.VirtualMachine`
    library: bytes | None = None  # the code as a shared library, where it is known already

    def exported(self) -> bytes:
        """Return the code as the content of a shared library."""
        return artefact.export_library(self.executable) if self.library is None else self.library


def save(
    path: str | os.PathLike[str],
    programs: Mapping[str, Program],
    settings: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: Any,
) -> None:
    """Write programs, and what they were made with and for, into one file.

    Raises `ArtefactError`: a batch holds something that cannot be saved.
    """
    parts: dict[str, bytes] = {}
    facts = {}
    libraries: dict[int, str] = {}  # functions of one executable share its code
    for name, program in programs.items():
        facts[name] = describe_captured(program.captured)
        for constant, content in constant_parts(program.captured).items():
            parts[f"{name}/constants/{constant}"] = content
        owner = libraries.setdefault(id(program.executable), name)
        facts[name]["library"] = f"{owner}/library"
        if owner == name:
            parts[f"{name}/library"] = program.exported()
    header = {
        "format": artefact.FORMAT,
        "versions": versions(),
        "processor": processor(),
        "model": describe_model(model),
        "optimizer": describe_optimizer(optimizer, model),
        "settings": dict(settings),
        "programs": facts,
    }
    artefact.write(path, header, parts)


def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: Callable[..., Any] | None,
) -> tuple[dict[str, Program], dict[str, Any]]:
    """Read a file, check it against this machine, the model and the optimizer, then load its code.

    Raises `ArtefactError`: the file is damaged, or was made with other versions, for another
    processor, model or optimizer.  Nothing of it has been executed.
    """
    header, parts = artefact.read(path)
    check_environment(path, header)
    check_model(path, header["model"], model)
    check_optimizer(path, header["optimizer"], optimizer, model)
    restored = {}
    for name, facts in header["programs"].items():
        prefix = f"{name}/constants/"
        contents = {
            key.removeprefix(prefix): value
            for key, value in parts.items()
            if key.startswith(prefix)
        }
        outer = restore_outer(facts, contents, model, loss_fn)
        restored[name] = restore_captured(facts, outer)
    runtime.load()
    libraries.install(device_of(model).type)
    programs = {}
    loaded: dict[str, Any] = {}
    for name, captured in restored.items():
        part = header["programs"][name]["library"]
        if part not in loaded:
            loaded[part] = artefact.load_library(parts[part])
        programs[name] = Program(captured, loaded[part], parts[part])
    return programs, header["settings"]
