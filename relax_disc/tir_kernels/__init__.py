"""Schedule rules for kernels with symbolic shapes, in the manner of TVM's dlight.

A rule is an object with ``apply(func, target, tunable) -> Schedule or None``; None means that the
kernel is another rule's.
"""

from __future__ import annotations

from typing import Any

from tvm.target import Target

from relax_disc.tir_kernels.cpu import cpu_rules
from relax_disc.tir_kernels.target import (
    cpu_target,
    cuda_target,
    resolve_target,
)


def rules_for(target: Target) -> list[Any]:
    """List the rules for a target, in the order in which they are tried."""
    if target.kind.name == "llvm":
        return cpu_rules()
    if target.kind.name == "cuda":
        # dlight takes a second to import, so only where it is needed.
        from relax_disc.tir_kernels.cuda import cuda_rules

        return cuda_rules()
    return []


__all__ = [
    "cpu_rules",
    "cpu_target",
    "cuda_target",
    "resolve_target",
    "rules_for",
]
