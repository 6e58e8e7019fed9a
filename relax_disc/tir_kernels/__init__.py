"""Schedule rules for kernels with symbolic shapes, in the manner of TVM's dlight.

A rule is an object with ``apply(func, target, tunable) -> Schedule or None``; None means that the
kernel is another rule's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.target import Target

from relax_disc.errors import InputMismatchError
from relax_disc.tir_kernels.cpu import cpu_rules
from relax_disc.tir_kernels.target import GPUS, cpu_target, cuda_target, resolve_target


def rules_for(target: Target) -> list[Any]:
    """List the rules for a target, in the order in which they are tried.

    Raises `InputMismatchError`: no rules run kernels there; unscheduled they would run on the host.
    """
    if target.kind.name == "llvm":
        return cpu_rules()
    if target.kind.name in GPUS:
        # dlight takes a second to import, so only where it is needed.
        from relax_disc.tir_kernels.cuda import cuda_rules

        return cuda_rules()
    # TVM 0.27 makes code for nvptx whose barriers its own LLVM refuses.
    raise InputMismatchError(
        f"kernels are generated for targets of kind llvm, {' and '.join(GPUS)}, not for "
        f"{target.kind.name}; NVIDIA's devices are of kind cuda."
    )


def accepts_chain(target: Target) -> Callable[[tirx.PrimFunc], bool] | None:
    """Return what tells whether a rule runs a kernel of several stages as one launch.

    None for targets where launches cost nothing.
    """
    if target.kind.name not in GPUS:
        return None
    from relax_disc.tir_kernels.cuda import Columns, Elementwise, Rows

    rules = [Elementwise(), Rows(), Columns()]
    return lambda kernel: any(rule.apply(kernel, target) is not None for rule in rules)


__all__ = ["accepts_chain", "cpu_rules", "cpu_target", "cuda_target", "resolve_target", "rules_for"]
