"""Known devices: tags for TVM's targets, and what plans must know of each before it is measured.

``tvm.target.Target("relax_disc/h100")`` describes an NVIDIA H100; `TAGS` lists all.  The figures
are the vendors' data sheets'; what `calibrate` measures replaces the rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm.target import Target, list_tags, register_tag

_GB, _KIB = 10**9, 1 << 10
# To the host of every GPU that is not named below: 16 lanes, each way, as data sheets say.
PCIE_4_BYTES_PER_NS = 32.0
_BUDGET_SHARE = 0.9  # of a device's memory: context, libraries and fragmentation take the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """What is known of a kind of device before anything is measured on it."""

    # architecture that code is generated for, such as ``"sm_90"``; empty for processors
    arch: str = ""
    memory_bytes: int = 0  # its memory; 0 where it is not the target that says it
    copy_bytes_per_ns: float  # bandwidth of its memory, in bytes per nanosecond (GB/s)
    # arithmetic in float32, in operations per nanosecond (GFLOP/s), without tensor cores
    flops_per_ns: float
    launch_ns: float = 3000.0  # time of an empty kernel
    host_bytes_per_ns: float = 0.0  # bandwidth to the host, each way; 0 for processors

    def default_budget_bytes(self) -> int | None:
        """Share of the memory that a step stays inside unless told otherwise; None if unknown."""
        return int(self.memory_bytes * _BUDGET_SHARE) if self.memory_bytes else None


# Architecture, memory in GB, GB/s of it, GFLOP/s in float32 without tensor cores, GB/s to the host
# (PCIe 4.0 or 5.0).
_GPUS = {
    "h100": ("sm_90", 80, 3350.0, 67_000.0, 64.0),  # data sheet of the SXM
    "h200": ("sm_90", 141, 4800.0, 67_000.0, 64.0),  # data sheet
    "a100": ("sm_80", 80, 2039.0, 19_500.0, 32.0),  # data sheet of the 80 GB SXM
    "rtx-4090": ("sm_89", 24, 1008.0, 82_600.0, 32.0),  # Ada architecture white paper
    "l4": ("sm_89", 24, 300.0, 30_300.0, 32.0),  # data sheet
}
TAGS: Mapping[str, DeviceFigures] = {
    **{
        f"relax_disc/{name}": DeviceFigures(
            arch=arch,
            memory_bytes=memory * _GB,
            copy_bytes_per_ns=rate,
            flops_per_ns=flops,
            host_bytes_per_ns=to_host,
        )
        for name, (arch, memory, rate, flops, to_host) in _GPUS.items()
    },
    # A processor of no particular kind: code for x86-64 with AVX2, planned as for two cores.
    "relax_disc/cpu": DeviceFigures(copy_bytes_per_ns=10.0, flops_per_ns=100.0),
}
"""By the name of the tag."""

# Of any GPU of an architecture, the most; data sheets: A100 108, RTX 4090 and L40S 142, H100 132,
# B200 148, RTX PRO 6000 188.
_MULTIPROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 160}
_MOST_MULTIPROCESSORS = 192
PRODUCT_WORKSPACE_BYTES = 32 << 20
"""What cuBLAS keeps for a stream, in PyTorch's allocator: the default of 2.13's
``aten/src/ATen/cuda/CublasHandlePool.cpp`` from compute capability 9.0 on, and of
``CUBLAS_WORKSPACE_CONFIG=:4096:8``; before 9.0 the default is 8.1 MiB."""

_THREADS, _WARP, _REGISTERS = 1024, 32, 65536  # of every architecture above, per block
_STATIC_SHARED_BYTES = 48 * _KIB  # what TVM's code takes without asking the driver for more
FAST_MATH = {"fast-math-contract": True}


def register_tags() -> None:
    """Make the tags known to TVM; once is enough, twice is harmless."""
    known = set(list_tags() or ())
    for name, figures in TAGS.items():
        if name in known:
            continue
        if figures.arch:
            register_tag(
                name,
                {
                    "kind": "cuda",
                    "tag": name,
                    "arch": figures.arch,
                    "max_num_threads": _THREADS,
                    "max_threads_per_block": _THREADS,
                    "thread_warp_size": _WARP,
                    "registers_per_block": _REGISTERS,
                    "max_shared_memory_per_block": _STATIC_SHARED_BYTES,
                },
            )
        else:
            register_tag(name, {"kind": "llvm", "tag": name, "mcpu": "x86-64-v3", **FAST_MATH})


def device_figures(target: Target) -> DeviceFigures | None:
    """Figures of a target that was made by one of the tags; None for any other."""
    return TAGS.get(str(target.tag))


def multiprocessors(target: Target | None) -> int:
    """Most multiprocessors that a GPU of a target has."""
    arch = "" if target is None else str(target.attrs.get("arch", ""))
    return _MULTIPROCESSORS.get(arch.removesuffix("a"), _MOST_MULTIPROCESSORS)
