"""Targets: this machine's processor, and CUDA devices by architecture."""

from __future__ import annotations

from tvm.target import Target, codegen

from relax_disc.vm_builtins.threads import core_count


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
            "num-cores": core_count(),
            "fast-math-contract": True,
            "fast-math-nsz": True,
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
