"""A model of how long a kernel takes on a GPU, from what the emulator counts of it.

A launch takes the longest of four: its bytes through memory, those through the cache of second
level, the sectors and instructions of its warps through the multiprocessors' load and store units,
and the accesses of its longest thread one after another for each wave of blocks. Not modelled:
arithmetic, registers, conflicts of shared memory's banks, waits at barriers. Nothing of it was
compared with a GPU yet: it ranks, and a small difference means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tvm.target import Target

from relax_disc.devices import TAGS
from tests.cuda.emulator import Call

_SECTOR = 32
_LATENCY_CYCLES = 400  # of memory; this and the next: doi 10.1016/j.ultsonch.2023.106546, table 3
_CACHE_RATE = 2.7  # of the second level's, in that of memory: of an H100
_OVERLAPPED = 4  # loads in flight of a thread: compilers unroll loops by four
_SECTORS_A_CYCLE, _INSTRUCTIONS_A_CYCLE = 4, 1  # of a multiprocessor's load and store unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiprocessors:
    """What `relax_disc.devices` does not tell of a GPU: NVIDIA's white papers and guide."""

    count: int
    cycles_per_ns: float
    threads: int  # these three: of one multiprocessor
    blocks: int
    shared_bytes: int


_OF_TAGS = {
    "h100": (132, 1.98, 2048, 32, 228),
    "h200": (132, 1.98, 2048, 32, 228),
    "a100": (108, 1.41, 2048, 32, 164),
    "rtx-4090": (128, 2.52, 1536, 24, 100),
    "l4": (58, 2.04, 1536, 24, 100),
}


def multiprocessors(tag: str) -> Multiprocessors:
    """Look a tag up, such as ``"relax_disc/h100"``; raises `KeyError`."""
    count, clock, threads, blocks, shared_kib = _OF_TAGS[tag.removeprefix("relax_disc/")]
    return Multiprocessors(
        count=count,
        cycles_per_ns=clock,
        threads=threads,
        blocks=blocks,
        shared_bytes=shared_kib << 10,
    )


def call_ns(call: Call, sizes: Mapping[str, int], target: Target) -> float:
    """Tell how long a call of a kernel takes.

    ``call``: with counts, from `Emulator.sampling`. ``sizes``: bytes of its operands by name.
    ``target``: made by one of the tags.
    """
    figures, units = TAGS[str(target.tag)], multiprocessors(str(target.tag))
    # What a block asks for again is in its cache; what another block asked for, in the second's.
    asked = [
        (count * _SECTOR, sizes.get(name, count * _SECTOR))
        for name, traffic in call.traffic.items()
        for count in (traffic.read, traffic.written)
    ]
    bytes_ns = max(
        sum(min(pair) for pair in asked) / figures.copy_bytes_per_ns,
        sum(count for count, _ in asked) / (_CACHE_RATE * figures.copy_bytes_per_ns),
    )
    warps_ns = waits_ns = 0.0
    for (_, extents), counts in zip(call.launches, call.counts, strict=True):
        blocks, threads = math.prod(extents[:3]), math.prod(extents[3:])
        resident = min(units.threads // max(32, threads), units.blocks)
        if counts.shared_bytes:
            resident = min(resident, int(units.shared_bytes // counts.shared_bytes))
        waves = math.ceil(blocks / (units.count * max(1, resident)))
        busy = min(blocks, units.count) * units.cycles_per_ns
        warps_ns += max(
            counts.sectors / (_SECTORS_A_CYCLE * busy),
            counts.instructions / (_INSTRUCTIONS_A_CYCLE * busy),
        )
        turns = math.ceil(counts.longest / _OVERLAPPED)
        waits_ns += waves * turns * _LATENCY_CYCLES / units.cycles_per_ns
    return figures.launch_ns * len(call.launches) + max(bytes_ns, warps_ns, waits_ns)
