"""A file in a folder that holds tensors of the optimizer's state, as ordinary tensors of PyTorch.

Their pages are the system's to keep: they come when somebody reads them.  A step brings those of a
kernel before it and writes them out and lets go of them after it.  What comes is compared with a
checksum of what went, unless this process used the pages or wrote the tensor meanwhile.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from relax_disc.vm_builtins.runtime import function


class StateFile:
    """A file without a name, which ends with the process.

    ``folder``: on a disk that is fast.

    Raises `OffloadError`: the folder is not there, or no file can be made in it.
    """

    LEAST_BYTES = 1 << 16
    """Smaller tensors stay: they would save nothing that is worth a transfer."""

    def __init__(self, folder: str) -> None:
        self.handle: Any = function("relax_disc.state_file")(folder)
        self._versions: dict[int, int] = {}

    def move(self, tensor: torch.Tensor) -> None:
        """Move a tensor into the file, its axes in order; it stays the same object and values.

        One that is there already stays where it is.  Raises `OffloadError`: the disk is full or
        fails; the tensor is where it was.
        """
        if self.holds(tensor):
            return
        size = tensor.nbytes
        address = int(function("relax_disc.state_file_allocate")(self.handle, size))
        memory = (ctypes.c_char * size).from_address(address)
        # With the last tensor that has the memory, however that got it.
        weakref.finalize(memory, _free, self.handle, address, self._versions).atexit = False
        moved = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
        with torch.no_grad():
            moved.copy_(tensor)
        function("relax_disc.state_file_put_away")(self.handle, address, size)
        tensor.data = moved
        self.note_version(tensor)

    def check_written(self, tensor: torch.Tensor) -> None:
        """See whether somebody wrote a tensor of the file since the last `note_version`."""
        address = tensor.data_ptr()
        if self._versions.get(address) != tensor._version:
            function("relax_disc.state_file_forget")(self.handle, address)
            self.note_version(tensor)

    def note_version(self, tensor: torch.Tensor) -> None:
        """Remember that a tensor of the file is as it was put away."""
        self._versions[tensor.data_ptr()] = tensor._version

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor lies in the file."""
        place = tensor.data_ptr(), tensor.nbytes
        return bool(function("relax_disc.state_file_holds")(self.handle, *place))


def _free(handle: Any, address: int, versions: dict[int, int]) -> None:
    versions.pop(address, None)
    function("relax_disc.state_file_free")(handle, address)
