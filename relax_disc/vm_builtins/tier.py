"""A folder that tensors are kept in while a step needs their memory for others.

>>> step = relax_disc.compile(..., memory_budget="2GiB", offload_to="/mnt/nvme")
>>> step.offload_to = relax_disc.FileTier("/mnt/nvme", bytes_per_s=1.5e9)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from relax_disc.errors import InputMismatchError
from relax_disc.vm_builtins.planner import plain
from relax_disc.vm_builtins.runtime import function


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What plans go by.

    Attributes
    ----------
    write_bytes_per_s, read_bytes_per_s : float
        Speeds.
    latency_ns : int
        Time of a transfer beside its bytes.
    buffer_bytes : int
        Memory that the transfers of a call take; it counts as a part of its peak.
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
        On a disk that is fast, such as an NVMe drive; a folder in memory (tmpfs) gains nothing.
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
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise InputMismatchError(f"bytes_per_s is a positive speed; got {bytes_per_s!r}.")
        if paced and bytes_per_s is None:
            raise InputMismatchError("paced=True needs bytes_per_s, the pace.")
        self.folder = os.fspath(folder)
        self.bytes_per_s, self.paced, self.recompute = bytes_per_s, paced, recompute
        make = function("relax_disc.file_tier")
        self.handle: Any = make(self.folder, float(bytes_per_s or 0), paced, recompute)

    def figures(self) -> TierFigures:
        """Tell what plans go by; measures the folder at the first use, some tenths of a second.

        Raises `OffloadError`: no file can be made there, written or read.
        """
        return TierFigures(**plain(function("relax_disc.tier_figures")(self.handle)))

    def __repr__(self) -> str:
        parts = [repr(self.folder)]
        if self.bytes_per_s is not None:
            parts.append(f"bytes_per_s={self.bytes_per_s:g}")
        parts += [f"{name}={value}" for name, value in
                  (("paced", self.paced), ("recompute", self.recompute))
                  if value is not (name == "recompute")]  # fmt: skip
        return f"FileTier({', '.join(parts)})"
