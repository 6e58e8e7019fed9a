"""Measured times of a step's kernels: made by a short run, kept with the step and in the cache.

They decide which kernels a plan runs again, never what is computed.  They hold for one kind of
machine, which they name, and each for one number of threads; no other uses them.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from relax_disc.errors import ArtefactError
from relax_disc.progress import phase
from relax_disc.training.cache import artefact
from relax_disc.training.variants import Variant, Variants
from relax_disc.vm_builtins import native
from relax_disc.vm_builtins.calibration import Measurement, apply_measurements, measured
from relax_disc.vm_builtins.session import Session

_logger = logging.getLogger(__name__)

SUFFIX = ".calibration"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured on one kind of machine."""

    machine: str  # as `machine_name` gives it
    # by the function's name in its program, each shape and number of threads once, in order
    measurements: Mapping[str, tuple[Measurement, ...]] = field(default_factory=dict)

    def of(self, function: str) -> tuple[Measurement, ...]:
        """Return the measurements of a function."""
        return self.measurements.get(function, ())

    def adding(self, function: str, measurement: Measurement) -> Calibration:
        """Return a calibration with one more shape, or with another result for a known one."""
        known = {(each.threads, each.dims): each for each in self.of(function)}
        known[measurement.threads, measurement.dims] = measurement
        ordered = tuple(known[key] for key in sorted(known))
        return Calibration(self.machine, {**self.measurements, function: ordered})

    def describe(self) -> dict[str, Any]:
        """Describe it in what JSON can hold."""
        return {
            "machine": self.machine,
            "functions": {
                name: [[list(each.dims), list(each.times_ns), each.threads] for each in found]
                for name, found in sorted(self.measurements.items())
            },
        }

    @staticmethod
    def restore(facts: Mapping[str, Any]) -> Calibration:
        """Undo `describe`."""
        functions = {
            name: tuple(
                Measurement(tuple(dims), tuple(times), count) for dims, times, count in found
            )
            for name, found in facts["functions"].items()
        }
        return Calibration(facts["machine"], functions)


def machine_name(device: torch.device) -> str:
    """Name what kernels' times depend on besides the threads: processor, accelerator."""
    name = f"{platform.machine()} {native.processor_name()}"
    if device.type == "cpu":
        return name
    return f"{name}, {torch.cuda.get_device_name(device)}"


def profiled(
    variants: Variants, run: Callable[[], object], repeats: int
) -> Iterator[tuple[str, Measurement]]:
    """Run something by each variant that fits, and yield the function's name and its times.

    Raises `MemoryBudgetError`: none fits.
    """

    def times(variant: Variant) -> tuple[str, Measurement]:
        name = variant.session.metadata.function
        with phase(f"measure the kernels of {name}"), variants.only(variant):
            return name, profile(variant.session, run, repeats)

    yield from variants.each(times)


def profile(session: Session, run: Callable[[], object], repeats: int) -> Measurement:
    """Run something several times and take each kernel's median time; the first run only warms."""
    found: list[Measurement] = []
    run()
    for _ in range(repeats):
        with session.profile():
            run()
        found.append(measured(session))
    times = zip(*(each.times_ns for each in found), strict=True)
    medians = tuple(statistics.median(column) for column in times)
    return Measurement(found[0].dims, medians, found[0].threads)


def usable(saved: Calibration | None, machine: str, where: object) -> Calibration | None:
    """Return a calibration if it was made on this machine; say so if it was not."""
    if saved is None or saved.machine == machine:
        return saved
    _logger.warning(
        "the calibration in %s was measured on %s and is not used on %s; call step.calibrate()",
        where, saved.machine, machine,
    )  # fmt: skip
    return None


def cache_file(folder: Path, key: str, machine: str) -> Path:
    """Name the file of a program's calibration on a machine."""
    return folder / f"{key}-{hashlib.sha256(machine.encode()).hexdigest()[:16]}{SUFFIX}"


def read(path: Path, machine: str) -> Calibration | None:
    """Read a calibration from the cache; None where there is none that can be used."""
    if not path.exists():
        return None
    try:
        header, _ = artefact.read(path)
    except ArtefactError as error:
        _logger.warning("kernels are not calibrated: %s", error)
        return None
    return usable(Calibration.restore(header["calibration"]), machine, path)


def write(path: Path, calibration: Calibration) -> None:
    """Keep a calibration in the cache, if the disk takes it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"format": artefact.FORMAT, "calibration": calibration.describe()}
        artefact.write(path, header, {})
    except OSError as error:  # a full or read-only disk must not stop the training
        _logger.warning("the calibration is not kept in %s: %s", path.parent, error)


def apply_to(session: Session, measurements: Sequence[Measurement]) -> None:
    """Plan by measured times, but for those of another table of kernels: an old cache's."""
    metadata = session.metadata
    size = len(metadata.dims), len(metadata.kernels)
    apply_measurements(
        session, [each for each in measurements if (len(each.dims), len(each.times_ns)) == size]
    )
