"""Make the run-time functions available: the C++ ones if they are built, else the Python twins."""

from __future__ import annotations

import functools

from relax_disc.vm_builtins import native


@functools.cache
def load() -> bool:
    """Register the global functions that compiled code calls; return whether they are native."""
    return native.load() is not None
