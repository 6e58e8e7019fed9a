"""Make the run-time functions available: the C++ ones if they are built, else the Python twin."""

from __future__ import annotations

import functools
import re
from typing import Any

import tvm_ffi

from relax_disc import errors
from relax_disc.vm_builtins import native

_LEAST = re.compile(r"least found feasible is (\d+) bytes")
_BOUND = re.compile(r"less than (\d+) bytes")


@functools.cache
def load() -> bool:
    """Register the global functions that compiled code calls; return whether they are native."""
    for kind in (
        errors.InputMismatchError,
        errors.ShapeRangeError,
        errors.OutOfMemoryError,
        errors.StepTornError,
        errors.ArtefactError,
        errors.OffloadError,
        errors.MemoryBudgetError,
    ):
        tvm_ffi.register_error(kind)
    # After its class, so that errors raised in Python keep their name on the way through C++.
    tvm_ffi.register_error("MemoryBudgetError", _BudgetErrorFromText)
    tvm_ffi.register_global_func("relax_disc.device_allocate", _device_allocate, override=True)
    tvm_ffi.register_global_func("relax_disc.device_copy", _device_copy, override=True)
    if native.load() is not None:
        return True
    from relax_disc.vm_builtins import runtime_twin

    runtime_twin.register()
    return False


def _device_allocate(device: Any, size: int) -> Any:
    from relax_disc.vm_builtins.libraries import (
        cuda_memory,  # imports torch, which the CPU does not need
    )

    return cuda_memory.allocate(device, size)


def _device_copy(source: Any, target: Any) -> None:
    from relax_disc.vm_builtins.libraries import cuda_memory

    cuda_memory.copy(source, target)


class _BudgetErrorFromText:
    """Makes the Python error of a C++ one, whose numbers are in its message."""

    def __new__(cls, message: str) -> errors.MemoryBudgetError:  # type: ignore[misc]
        least, bound = _LEAST.search(message), _BOUND.search(message)
        return errors.MemoryBudgetError(
            message, int(least[1]) if least else 0, int(bound[1]) if bound else 0
        )
