"""Memory of the Python run time; the twin of `src/runtime/memory.cc` and `src/runtime/arena.cc`."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm

from relax_disc.errors import OutOfMemoryError
from relax_disc.vm_builtins.runtime_twin_plan import ALIGNMENT

_IDLE_CALLS = 64


class Memory:
    """Counts what is allocated, and fails where a test asks for it."""

    countdown = -1
    allocated = 0

    @classmethod
    def check(cls, size: int) -> None:
        """Refuse the allocation that a test has marked."""
        if cls.countdown >= 0:
            cls.countdown -= 1
            if cls.countdown == -1:
                raise OutOfMemoryError(
                    f"the system has no {size} bytes for the memory of this call; nothing was "
                    "changed. Lower the memory budget or the size of the batch."
                )


class Block:
    """One contiguous, aligned piece of memory; address space only where `reserved`."""

    size = 0

    def __init__(self, size: int, *, reserved: bool = False) -> None:
        Memory.check(size)
        whole = (
            _reserved(size + 2 * ALIGNMENT) if reserved else np.empty(size + 2 * ALIGNMENT, "u1")
        )
        start = -whole.ctypes.data % ALIGNMENT
        self.data = whole[start : start + size + ALIGNMENT]
        self.size = size
        Memory.allocated += size

    def __del__(self) -> None:
        Memory.allocated -= self.size

    def view(self, offset: int, shape: Sequence[int], dtype: str) -> tvm.runtime.Tensor:
        """Make a tensor at an offset, its data pointer shifted."""
        size = int(np.prod(shape, dtype=np.int64)) * (tvm.DataType(dtype).bits + 7) // 8
        start = offset if size else 0
        piece = self.data[start : start + max(size, 1)]
        return tvm.runtime.from_dlpack(piece)._create_view(list(shape), dtype, 0)


class SharedArena:
    """The arena of one session, or of several whose calls take turns; see `runtime_arena.h`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.block: Block | None = None
        self.workspace = 0  # bytes; numpy's own, so that there is nothing to lend
        self.taken = False
        self.idle_calls = self.idle_need = 0

    def take(self, needed: int, workspace: int, room: int | None) -> Block | None:
        """Lend the arena, grown or shrunk; None if a call has it."""
        with self.lock:
            if self.taken:
                return None
            size = 0 if self.block is None else self.block.size
            least = max(needed, size)
            beside = max(workspace, self.workspace)
            if self._is_idle(needed, size):
                least = self.idle_need
            if room is not None and least + beside > room:
                least, beside = needed, workspace
            if self.block is None or least != size:
                self.block = None
                self.block = Block(least)
            self.workspace = beside
            self.taken = True
            return self.block

    def _is_idle(self, needed: int, size: int) -> bool:
        """Count a call's need; whether the arena has been too large for a while."""
        small = self.block is not None and needed <= size // 2
        self.idle_calls = self.idle_calls + 1 if small else 0
        self.idle_need = max(self.idle_need, needed) if small else 0
        if self.idle_calls < _IDLE_CALLS:
            return False
        self.idle_calls = 0
        return True

    def fill(self, byte: int) -> None:
        """Set every byte that is held, for tests: who reads it gets this."""
        with self.lock:
            if self.block is not None and not self.taken:
                self.block.data[:] = byte

    def give_back_above(self, size: int) -> None:
        """Give everything back if more than so many bytes are held and no call has it."""
        with self.lock:
            if not self.taken and self.size > size:
                self.block, self.workspace = None, 0

    @property
    def size(self) -> int:
        """Bytes held."""
        return self.workspace + (0 if self.block is None else self.block.size)


def copy(source: Any, target: Any) -> None:
    """Copy one tensor's bytes to another of the same size."""
    begin, end = _address(source), _address(target)
    if begin != end:
        ctypes.memmove(end, begin, tensor_bytes(source))


def tensor_bytes(tensor: Any) -> int:
    """Bytes of a tensor."""
    elements = int(np.prod(list(tensor.shape), dtype=np.int64))
    return elements * ((tvm.DataType(str(tensor.dtype)).bits + 7) // 8)


def _address(tensor: Any) -> int:
    return tensor.data_ptr()


def _reserved(size: int) -> np.ndarray:
    """Address space that reading or writing would crash on, given back with the array."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    address = library.mmap(None, size, 0, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OutOfMemoryError(f"the system has no {size} bytes of address space")
    array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    weakref.finalize(array, library.munmap, address, size)
    return array
