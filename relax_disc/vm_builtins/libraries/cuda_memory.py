"""Device memory of the run time on CUDA: PyTorch's allocator gives the arena.

So `torch.cuda.max_memory_allocated` counts it, and both share one pool of device memory.
"""

from __future__ import annotations

from typing import Any

import torch
import tvm_ffi


def allocate(device: Any, size: int) -> Any:
    """Make a one-dimensional byte tensor; its memory is freed with it.

    Raises `MemoryError`: the device has no such memory left.
    """
    place = torch.device("cuda", device.index)
    try:
        return tvm_ffi.from_dlpack(torch.empty(size, dtype=torch.uint8, device=place))
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryError(
            f"the device has no {size} bytes for the memory of this call; nothing was changed. "
            "Lower the memory budget or the size of the batch."
        ) from error


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
