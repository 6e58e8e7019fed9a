"""The libraries that compiled code calls by name: which one for which device."""

from __future__ import annotations

from relax_disc.vm_builtins.libraries import library_kernels


def install(device: str) -> None:
    """Register the library's functions, once per process.

    Whoever compiles code needs them, and whoever loads compiled code.

    Parameters
    ----------
    device : str
        "cuda"; everything else runs on the CPU's library.
    """
    if device == "cuda":
        # Imports torch, a second's work.
        from relax_disc.vm_builtins.libraries import cuda_library

        cuda_library.install()
    else:
        library_kernels.install()
