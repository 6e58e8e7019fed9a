"""Where tensors are kept while a step needs their memory for others.

>>> step = relax_disc.compile(..., memory_budget="2GiB", offload_to="/mnt/nvme")
>>> step.offload_to = relax_disc.FileTier("/mnt/nvme", bytes_per_s=1.5e9)
>>> step = relax_disc.compile(..., target="relax_disc/h100", offload_to="host")
>>> step.offload_to = relax_disc.HostTier(bytes_per_s=25e9)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from relax_disc.errors import InputMismatchError, OffloadError
from relax_disc.vm_builtins.plan_metadata import Machine
from relax_disc.vm_builtins.planner import plain
from relax_disc.vm_builtins.runtime import function


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What plans go by.

    ``write_bytes_per_s``, ``read_bytes_per_s``: speeds. ``latency_ns``: time of a transfer beside
    its bytes. ``buffer_bytes``: memory that the transfers of a call take; it counts as a part of
    its peak.
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_ns: int
    buffer_bytes: int


class FileTier:
    """A file in a folder, for tensors that a step evicts and reads back later.

    It takes part under a memory budget only.  The plan of a shape chooses for each evicted tensor
    whether it is computed again or written and read back, by the modelled time; a thread of its own
    moves the bytes while kernels run.  The file has no name and ends with the process.

    Parameters
    ----------
    folder : path-like
        On a disk that is fast, such as an NVMe drive; a folder in memory (tmpfs) gains nothing. A
        relative one is of the present working directory.
    bytes_per_s : float, optional
        The speed of writing and of reading that plans go by; measured at the first use by default.
        Plans are the same for the same figures.
    paced : bool
        Let no transfer take less time than plans take it to, for tests and benchmarks.
    recompute : bool
        False: nothing is computed again, what is evicted is read back.

    Raises
    ------
    OffloadError
        The folder is not there.
    InputMismatchError
        A speed that is not positive, or a pace without a speed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        bytes_per_s: float | None = None,
        paced: bool = False,
        recompute: bool = True,
    ) -> None:
        _check_speed(bytes_per_s)
        if paced and bytes_per_s is None:
            raise InputMismatchError("paced=True needs bytes_per_s, the pace.")
        self.folder = str(Path(os.fsdecode(folder)).absolute())
        self.bytes_per_s, self.paced, self.recompute = bytes_per_s, paced, recompute
        make = function("relax_disc.file_tier")
        self.handle: Any = make(self.folder, float(bytes_per_s or 0), paced, recompute)

    def figures(self) -> TierFigures:
        """Tell what plans go by; measures the folder at the first use, some tenths of a second.

        Raises `OffloadError`: no file can be made there, written or read.
        """
        return TierFigures(**plain(function("relax_disc.tier_figures")(self.handle)))

    def handle_on(self, machine: Machine, device: torch.device) -> Any:
        """Return the run time's object; see `tier_for`."""
        return self.handle

    def __repr__(self) -> str:
        parts = [repr(self.folder)]
        if self.bytes_per_s is not None:
            parts.append(f"bytes_per_s={self.bytes_per_s:g}")
        parts += [f"{name}={value}" for name, value in
                  (("paced", self.paced), ("recompute", self.recompute))
                  if value is not (name == "recompute")]  # fmt: skip
        return f"FileTier({', '.join(parts)})"


class HostTier:
    """Pinned memory of the host, for tensors of a GPU that a step evicts and reads back later.

    As `FileTier`, but copies run on a stream of their own.  One buffer, as large as the largest
    call so far needed (`MemoryPlan.offload_space_bytes`), goes when the tier does.

    Parameters
    ----------
    bytes_per_s : float, optional
        The speed of copies, each way, that plans go by; by default it is measured on the device
        when a step gets the tier.  Without a GPU, to plan, it is the target's.
    recompute : bool
        False: nothing is computed again, what is evicted is read back.

    Raises
    ------
    InputMismatchError
        A speed that is not positive.
    """

    def __init__(self, *, bytes_per_s: float | None = None, recompute: bool = True) -> None:
        _check_speed(bytes_per_s)
        self.bytes_per_s, self.recompute = bytes_per_s, recompute
        self._handles: dict[tuple[Machine, torch.device], Any] = {}

    def handle_on(self, machine: Machine, device: torch.device) -> Any:
        """Return the run time's object for a device, which steps on it share; see `tier_for`."""
        key = machine, device
        if key not in self._handles:
            make = function("relax_disc.host_tier")
            self._handles[key] = make(*self._speeds(machine, device), self.recompute)
        return self._handles[key]

    def _speeds(self, machine: Machine, device: torch.device) -> tuple[float, float, int]:
        """Bytes per nanosecond to the host and back, and the nanoseconds of a copy beside them."""
        if self.bytes_per_s is not None:
            return self.bytes_per_s / 1e9, self.bytes_per_s / 1e9, 0
        if device.type != "cuda":  # to plan only: a copy begins as a kernel does
            return machine.host_bytes_per_ns, machine.host_bytes_per_ns, int(machine.overhead_ns)
        from relax_disc.vm_builtins.libraries.cuda_memory import host_copy_times

        host_copy_times(device, _MEASURED_BYTES, 1)  # the first makes the stream's context
        small = _rounded(sum(host_copy_times(device, _SMALL_BYTES, _REPEATS)) / 2)
        out, back = host_copy_times(device, _MEASURED_BYTES, _REPEATS)
        written, read = (_rounded(_MEASURED_BYTES / max(each - small, 1.0)) for each in (out, back))
        return written, read, int(small)

    def __repr__(self) -> str:
        return f"HostTier(bytes_per_s={self.bytes_per_s}, recompute={self.recompute})"


Tier: TypeAlias = FileTier | HostTier
TierName: TypeAlias = Tier | str | os.PathLike[str] | None
"""What `offload_to` takes: a tier, a folder, ``"host"`` or nothing."""


def tier_for(value: TierName, *, on_host: bool) -> Tier | None:
    """Make a tier of what `offload_to` is given.

    ``value``: the text ``"host"`` is pinned memory; a folder of this name is ``"./host"``.
    ``on_host``: whether the program runs on the host's processor.

    Raises `OffloadError`: the folder is not there, or what runs there cannot use the tier.
    """
    if value is None:
        return None
    if isinstance(value, FileTier | HostTier):
        tier = value
    else:
        tier = HostTier() if value == "host" else FileTier(value)
    if isinstance(tier, HostTier) and on_host:
        raise OffloadError(
            'offload_to="host" is pinned memory for programs that run on a GPU; this one runs in '
            "the host's memory already. Name a folder on a fast disk (relax_disc.FileTier)."
        )
    if isinstance(tier, FileTier) and not on_host:
        raise OffloadError(
            "offload_to: tensors of a GPU cannot be offloaded to a folder; say "
            'offload_to="host" for pinned memory of the host (relax_disc.HostTier).'
        )
    return tier


# Copied to learn the speeds, and the time of a copy beside its bytes; how often.
_MEASURED_BYTES, _SMALL_BYTES, _REPEATS = 1 << 24, 1 << 12, 9


def _rounded(value: float) -> float:
    """To two digits, so that measuring again mostly gives the same plans."""
    return float(f"{value:.1e}")


def _check_speed(bytes_per_s: float | None) -> None:
    if bytes_per_s is not None and not bytes_per_s > 0:
        raise InputMismatchError(f"bytes_per_s is a positive speed; got {bytes_per_s!r}.")


_OFFLOADED = ("activations", "optimizer")


def check_offload(value: str | Sequence[str], offload_to: Any, optimizer: Any) -> tuple[str, ...]:
    """Return what is offloaded, as names.

    Raises `InputMismatchError`: a name is unknown, or the optimizer's state has no folder, or there
    is no optimizer.
    """
    names = (value,) if isinstance(value, str) else tuple(value)
    unknown = [name for name in names if name not in _OFFLOADED]
    if unknown or not names:
        raise InputMismatchError(
            f"offload names what goes to the folder: {' or '.join(map(repr, _OFFLOADED))}, or "
            f"both; got {unknown[0] if unknown else value!r}."
        )
    if "optimizer" in names and not isinstance(offload_to, FileTier):
        raise InputMismatchError(
            "offload='optimizer' needs offload_to, a folder on a fast disk for the state; on the "
            "CPU only."
        )
    if "optimizer" in names and not optimizer:
        raise InputMismatchError(
            "offload='optimizer': without an optimizer the step knows no state; leave it out."
        )
    return names
