"""Which small kernels of parameters alone become one, such as counters of batch norms; for CUDA.

Each reads parameters that nothing else reads, so they may run together at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from relax_disc.ops.operand_views import operands_of
from relax_disc.transform.fusion.kernel_graph import Join, KernelGraph, calls_of
from relax_disc.transform.fusion.producers import INJECTIVE, pattern_of

_MOST_KERNELS = 32
_MOST_ELEMENTS = 1024


def find_counters(mod: tvm.IRModule, function: relax.Function, block: Any) -> list[Join]:
    """Find such kernels of a block; ``mod``: after `FuseOps`, before `FuseTIR`."""
    return list(_Finder(mod, function, list(block.bindings)).joins())


class _Finder(KernelGraph):
    def joins(self) -> Iterator[Join]:
        """Yield kernels that are alike in what they write, in order."""
        alike: dict[Any, list[int]] = {}
        for place, binding in enumerate(self._bindings):
            if self._is_counter(place):
                alike.setdefault(tvm_ffi.StructuralKey(binding.var.ty), []).append(place)
        for places in alike.values():
            for first in range(0, len(places), _MOST_KERNELS):
                if len(several := places[first : first + _MOST_KERNELS]) > 1:
                    yield Join(several)

    def _is_counter(self, place: int) -> bool:
        binding = self._bindings[place]
        if place in self._views or not isinstance(binding.value, relax.Call):
            return False
        parts = calls_of(self._mod, binding.value)
        if not parts or any(pattern_of(self._mod, part) > INJECTIVE for part in parts):
            return False
        if not _is_small(binding.var):
            return False
        operands = operands_of(binding.value)
        return all(
            operand in self._parameters
            and operand not in self._escaping
            and self._readers.get(operand) == {place}
            for operand in operands
        )


def _is_small(value: relax.Var) -> bool:
    count = 1
    for size in value.ty.shape.values:
        if not isinstance(size, tirx.IntImm):
            return False
        count *= int(size.value)
    return count <= _MOST_ELEMENTS
