"""Let compiled code run where PyTorch's own kernels would: on its current stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import tvm_ffi


def on_current_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, the virtual machine and its libraries use a device's current stream of PyTorch."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.current_stream(device)
    place = tvm_ffi.device("cuda", stream.device_index)
    return tvm_ffi.use_raw_stream(place, stream.cuda_stream)
