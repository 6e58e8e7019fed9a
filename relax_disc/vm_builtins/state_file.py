"""A file in a folder that holds tensors of the optimizer's state, as ordinary tensors of PyTorch.

Their pages are the system's to keep: they come when somebody reads them.  A step brings those of a
kernel before it and writes them out and lets go of them after it.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from relax_disc.vm_builtins.runtime import function


class StateFile:
    """A file without a name, which ends with the process.

    Parameters
    ----------
    folder : str
        On a disk that is fast.

    Raises
    ------
    OffloadError
        The folder is not there, or no file can be made in it.
    """

    LEAST_BYTES = 1 << 16
    """Smaller tensors stay: they would save nothing that is worth a transfer."""

    def __init__(self, folder: str) -> None:
        self.handle: Any = function("relax_disc.state_file")(folder)

    def move(self, tensor: torch.Tensor) -> None:
        """Move a tensor into the file; it stays the same object, with the same values.

        Raises `OffloadError`: the disk is full or fails; the tensor is where it was.
        """
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((extent - 1) * stride for extent, stride in axes)
        size = count * tensor.element_size()
        address = int(function("relax_disc.state_file_allocate")(self.handle, size))
        memory = (ctypes.c_char * size).from_address(address)
        # With the last tensor that has the memory, however that got it.
        weakref.finalize(memory, _free, self.handle, address).atexit = False
        flat = torch.frombuffer(memory, dtype=tensor.dtype)
        moved = flat.as_strided(tensor.shape, tensor.stride())
        with torch.no_grad():
            moved.copy_(tensor)
        function("relax_disc.state_file_put_away")(self.handle, address, size)
        tensor.data = moved

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor lies in the file."""
        size = tensor.numel() * tensor.element_size()
        return bool(function("relax_disc.state_file_holds")(self.handle, tensor.data_ptr(), size))


def _free(handle: Any, address: int) -> None:
    function("relax_disc.state_file_free")(handle, address)
