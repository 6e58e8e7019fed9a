"""Targets: this machine's processor, CUDA devices by architecture or by a tag of `devices`."""

from __future__ import annotations

import os

from tvm.target import Target, codegen

from relax_disc.devices import FAST_MATH, TAGS
from relax_disc.errors import InputMismatchError

GPUS = ("cuda", "rocm")
"""Kinds of targets that kernels with threads are made for; code for ROCm never ran."""


def resolve_target(target: str | Target) -> Target:
    """Make a target of what a user says.

    Parameters
    ----------
    target : str or tvm.target.Target
        ``"llvm"`` is this machine's processor; a tag, such as ``"relax_disc/h100"``; or what
        TVM's `Target` takes.

    Returns
    -------
    tvm.target.Target
        With this machine's processor as host, if it needs one and names none.

    Raises
    ------
    InputMismatchError
        TVM knows no such target; lists the tags.
    """
    if isinstance(target, Target):
        return target
    if target == "llvm":
        return cpu_target()
    try:
        found = Target(target)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputMismatchError(
            f"target={target!r} is no target of TVM: say 'llvm' for this machine's processor, a "
            f"tag ({', '.join(sorted(TAGS))}), "
            "or a dict such as {'kind': 'cuda', 'arch': 'sm_90'}."
        ) from error
    needs_host = found.kind.name in GPUS and found.host is None
    return found.with_host(cpu_target()) if needs_host else found


def cpu_target() -> Target:
    """Describe this machine's processor to TVM.

    LLVM may contract ``a * b + c`` and ignore the sign of zero; it may not reorder sums (ours are
    written in vector lanes already, and the exponential relies on the order of its terms) and must
    honour NaN and infinities.

    Returns
    -------
    tvm.target.Target
        Kind ``llvm`` with the processor's name and its number of cores.
    """
    return Target(
        {
            "kind": "llvm",
            "mcpu": codegen.llvm_get_system_cpu(),
            "num-cores": os.cpu_count() or 1,
            **FAST_MATH,
        }
    )


def cuda_target(arch: str = "sm_80") -> Target:
    """Describe a CUDA device, hosted by this machine's processor.

    Parameters
    ----------
    arch : str
        Such as ``"sm_80"`` or ``"sm_90"``.  The accelerated variants (``"sm_90a"``) switch
        dlight's tensor-core rules off, so leave the letter out.
    """
    return Target({"kind": "cuda", "arch": arch}, host=cpu_target())
