"""The table of kernels of one compiled function: what PlanArena writes and the run time reads.

Integers that depend on the shape are postfix programs over the dims (`SymbolicExpr.program`), kept
once each; tensors, views and kernels name them by index.  The reader is `src/runtime/metadata.cc`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

FORMAT_VERSION = 10

Program = tuple[int, ...]


class Storage(IntEnum):
    """Where a tensor's bytes are; the same numbers as in `runtime_metadata.h`."""

    ARENA = 0
    GIVEN = 1
    ESCAPING = 2
    OVERWRITE = 3


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A piece of memory."""

    name: str  # for reports
    bytes: int  # index of the program of its size
    storage: Storage  # where it is
    given: int = -1  # for GIVEN and OVERWRITE: which tensor of the caller, else -1
    begin: int = -1  # byte of that tensor at which this part of it begins; -1: it is all of it


@dataclass(frozen=True, slots=True)
class ViewEntry:
    """A tensor seen with a type and a shape, the latter as indices of programs."""

    tensor: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One kernel call."""

    # the function's name, and the line of the user's model
    name: str
    source: str
    # kind and value: ("view", view), ("integer", program), ("shape", programs), or a constant:
    # "float", "number", "text", "dtype"
    arguments: tuple[tuple[str, Any], ...]
    # tensors; workspace is an output that nobody reads
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    # input and output in the arena that may share their place
    inplace: tuple[tuple[int, int], ...] = ()
    # views (from, to) that are copied before the kernel runs, where they are not the same place
    copies: tuple[tuple[int, int], ...] = ()
    # indices of programs
    flops: int = 0
    moved_bytes: int = 0
    recomputable: bool = True  # whether it may run again
    # formula of the memory that a library kernel needs beside its arguments, and the programs of
    # its parameters (`workspace.cc`); ("", ()) for others. On a GPU the second parameter is its
    # bytes, outside the arena, all of them unless the formula is "aten_at_least"
    workspace: tuple[str, tuple[int, ...]] = ("", ())
    # the dim whose size is known once the kernel has run, which returns it; -1: none
    counts: int = -1


@dataclass(frozen=True, slots=True)
class CountCheckEntry:
    """What dims must fulfil once the last of them has been counted; else the call is refused."""

    size: int  # index of a program
    relation: str  # "<=": the size must not be above the limit; "!=": they must differ
    limit: int
    dims: tuple[int, ...]  # that it mentions
    message: str  # what the model does or needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What plans must know of the machine that a function runs on.

    A kernel's time is ``max(flops / flops_per_ns, bytes / bytes_per_ns) + overhead_ns`` until it
    has been measured.
    """

    # bytes that every size and offset is a multiple of: 64 on CPUs, 256 on GPUs
    alignment: int = 64
    # by default as of two cores of a desktop
    flops_per_ns: float = 100.0
    bytes_per_ns: float = 10.0
    overhead_ns: float = 3000.0
    # of copies to and from pinned memory of the host; 0: the program runs on the host
    host_bytes_per_ns: float = 0.0
    # what libraries keep in its memory all the time
    library_bytes: int = 0

    @property
    def is_host(self) -> bool:
        """Whether the program runs on the host's processor, in the host's memory."""
        return self.host_bytes_per_ns == 0


@dataclass(frozen=True, slots=True)
class PlanMetadata:
    """Everything that the run time knows of one function."""

    function: str
    dims: tuple[str, ...]  # names of the dims, in the order in which the run time gets their values
    programs: tuple[Program, ...]  # postfix codes
    # the tables
    tensors: tuple[TensorEntry, ...]
    views: tuple[ViewEntry, ...]
    kernels: tuple[KernelEntry, ...]
    outputs: tuple[int, ...]  # views that the function returns, in order
    machine: Machine  # what it runs on
    count_checks: tuple[CountCheckEntry, ...] = ()
    # Large gradients that are never made by rows: the parameter, how many of the function's
    # parameters come before it, and why (`split_gradients`).  Only Python reads them.
    whole_gradients: tuple[tuple[str, int, str], ...] = ()

    def unbounded_calls(self) -> tuple[str, ...]:
        """Name the library functions that take more memory than anybody can tell before."""
        found = (kernel.name for kernel in self.kernels if kernel.workspace[0] == "aten_at_least")
        return tuple(sorted(set(found)))

    def to_json(self) -> str:
        """Write the table as text."""
        return json.dumps(
            {
                "version": FORMAT_VERSION,
                "function": self.function,
                "dims": self.dims,
                "programs": self.programs,
                "tensors": [
                    [t.name, t.bytes, int(t.storage), t.given, t.begin] for t in self.tensors
                ],
                "views": [[v.tensor, v.dtype, v.shape] for v in self.views],
                "kernels": [asdict(kernel) for kernel in self.kernels],
                "outputs": self.outputs,
                "machine": asdict(self.machine),
                "count_checks": [asdict(check) for check in self.count_checks],
                "whole_gradients": self.whole_gradients,
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> PlanMetadata:
        """Read a table that `to_json` wrote.

        Raises `ValueError`: the text has another format version.
        """
        data = json.loads(text)
        if data["version"] != FORMAT_VERSION:
            raise ValueError(f"plan metadata of version {data['version']}, not {FORMAT_VERSION}")
        return PlanMetadata(
            function=data["function"],
            dims=tuple(data["dims"]),
            programs=tuple(map(tuple, data["programs"])),
            tensors=tuple(
                TensorEntry(name, size, Storage(storage), given, begin)
                for name, size, storage, given, begin in data["tensors"]
            ),
            views=tuple(ViewEntry(t, d, tuple(s)) for t, d, s in data["views"]),
            kernels=tuple(_kernel(entry) for entry in data["kernels"]),
            outputs=tuple(data["outputs"]),
            machine=Machine(**data["machine"]),
            count_checks=tuple(
                CountCheckEntry(**{**check, "dims": tuple(check["dims"])})
                for check in data["count_checks"]
            ),
            whole_gradients=tuple((name, k, why) for name, k, why in data["whole_gradients"]),
        )


def _kernel(entry: dict[str, Any]) -> KernelEntry:
    tuples = {
        name: tuple(tuple(x) if isinstance(x, list) else x for x in entry[name])
        for name in ("arguments", "inputs", "outputs", "inplace", "copies")
    }
    formula, numbers = entry["workspace"]
    return KernelEntry(**{**entry, **tuples, "workspace": (formula, tuple(numbers))})


class ProgramTable:
    """Collects programs, each once."""

    def __init__(self) -> None:
        self._index: dict[Program, int] = {}

    def add(self, program: Sequence[int]) -> int:
        """Index of a program, which is added if it is new."""
        return self._index.setdefault(tuple(program), len(self._index))

    def all(self) -> tuple[Program, ...]:
        """Return all programs in the order of their indices."""
        return tuple(self._index)
