"""One thread pool for all kernels: TVM's, sized to the machine.

By itself TVM starts one thread for every two logical processors, and a library with a pool of its
own beside TVM's made a training step 2-4 times slower. So TVM's pool gets one thread per core that
this process may use, and library kernels run on that pool.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from pathlib import Path

import tvm_ffi

_logger = logging.getLogger(__name__)

_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def core_count() -> int:
    """Physical cores that this process may use: affinity, hyper-threads and quota counted."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = len({_core_of(processor) for processor in allowed}) or os.cpu_count() or 1
    quota = _processor_quota()
    return max(1, min(cores, math.ceil(quota))) if quota else max(1, cores)


def _core_of(processor: int) -> tuple[str, str]:
    """Package and core number of a logical processor; its own number where that is unknown."""
    folder = _TOPOLOGY / f"cpu{processor}" / "topology"
    try:
        return (
            (folder / "physical_package_id").read_text().strip(),
            (folder / "core_id").read_text().strip(),
        )
    except OSError:
        return ("", str(processor))


def _processor_quota() -> float | None:
    """Processors' worth of time that the control group grants; None without a limit."""
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


@functools.cache
def configure() -> int:
    """Size the process's kernel thread pool, once, before its first use.

    The environment variable `TVM_NUM_THREADS` overrides the number of cores.

    Returns
    -------
    int
        Number of threads that kernels use.
    """
    os.environ.setdefault("TVM_NUM_THREADS", str(core_count()))
    count = int(tvm_ffi.get_global_func("runtime.NumThreads")())
    _logger.debug("kernels use %d threads", count)
    return count
