"""Memory of the run time on CUDA: PyTorch's allocators give the arena, and pinned memory.

So `torch.cuda.max_memory_allocated` counts it, and both share one pool of device memory.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import tvm_ffi

from relax_disc.errors import OutOfMemoryError

_PINNED = 3  # memory of the host, as DLPack numbers kinds of devices


def allocate(device: Any, size: int) -> Any:
    """Make a one-dimensional byte tensor; its memory is freed with it.

    Raises `MemoryError`: the device, or the host that it is pinned on, has no such memory left.
    """
    if device.dlpack_device_type() == _PINNED:
        return tvm_ffi.from_dlpack(pinned(size))
    place = torch.device("cuda", device.index)
    try:
        return tvm_ffi.from_dlpack(torch.empty(size, dtype=torch.uint8, device=place))
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryError(
            f"the device has no {size} bytes for the memory of this call; nothing was changed. "
            "Lower the memory budget or the size of the batch."
        ) from error


def pinned(size: int) -> torch.Tensor:
    """Make a byte tensor in pinned memory of the host.

    Raises `OutOfMemoryError`: the host has no such memory left.
    """
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # of CUDA, which names no kind for it
        raise OutOfMemoryError(
            f"the host has no {size} bytes of pinned memory for what this call offloads; nothing "
            "was changed. Raise the memory budget, or leave offload_to out."
        ) from error


def host_copy_times(device: torch.device, size: int, repeats: int) -> tuple[float, float]:
    """Time copies between pinned memory and a device on a stream of their own.

    Returns the nanoseconds of a copy of so many bytes to the host and of one back, medians; waits
    for the device.
    """
    host, there = pinned(size), torch.empty(size, dtype=torch.uint8, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # memory that earlier kernels may use

    def time(source: torch.Tensor, target: torch.Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        target.copy_(source, non_blocking=True)
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) * 1e6

    with torch.cuda.stream(stream):
        times = [(time(there, host), time(host, there)) for _ in range(repeats)]
    out, back = (statistics.median(each) for each in zip(*times, strict=True))
    return out, back


def copy(source: Any, target: Any) -> None:
    """Copy between two tensors on the stream that the virtual machine uses."""
    here, there = torch.from_dlpack(source), torch.from_dlpack(target)
    device = there.device
    number = tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", device.index))
    if number:
        stream = torch.cuda.ExternalStream(number, device)
    else:
        stream = torch.cuda.default_stream(device)
    with torch.no_grad(), torch.cuda.stream(stream):
        there.copy_(here)
