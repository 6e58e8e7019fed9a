"""The functions of the native library by name; errors that keep their class through C++."""

from __future__ import annotations

import functools
from typing import Any

import tvm_ffi

from relax_disc import errors
from relax_disc.vm_builtins import native


@functools.cache
def load() -> None:
    """Register the global functions that compiled code calls."""
    for kind in (
        errors.InputMismatchError,
        errors.ShapeRangeError,
        errors.OutOfMemoryError,
        errors.StepTornError,
        errors.ArtefactError,
        errors.OffloadError,
        errors.MemoryBudgetError,
        errors.UnsupportedOperatorError,
    ):
        tvm_ffi.register_error(kind)
    for each in (_device_allocate, _device_copy, _device_synchronize):
        tvm_ffi.register_global_func(f"relax_disc.{each.__name__[1:]}", each, override=True)
    native.load()


@functools.cache
def function(name: str) -> Any:
    """Return a function of the native library."""
    load()
    return tvm_ffi.get_global_func(name)


def _device_allocate(device: Any, size: int) -> Any:
    # Imports torch, which the CPU does not need.
    from relax_disc.vm_builtins.libraries import cuda_memory

    return cuda_memory.allocate(device, size)


def _device_copy(source: Any, target: Any) -> None:
    from relax_disc.vm_builtins.libraries import cuda_memory

    cuda_memory.copy(source, target)


def _device_synchronize(device: Any) -> None:
    from relax_disc.vm_builtins.libraries import cuda_memory

    cuda_memory.synchronize(device)
