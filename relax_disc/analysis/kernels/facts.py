"""What a kernel's body says of it: which results may lie over its inputs, and its arithmetic."""

from __future__ import annotations

import tvm
from tvm import tirx

from relax_disc.analysis.kernels.inplace import inplace_pairs
from relax_disc.analysis.kernels.library import (
    library_flops,
    library_overwrites,
    library_workspace,
)
from relax_disc.analysis.program.table import FunctionTable, KernelCall


class KernelFacts:
    """Facts about the kernels of one function; PrimFuncs are analysed once each."""

    def __init__(self, mod: tvm.IRModule, table: FunctionTable) -> None:
        self._mod = mod
        self._table = table
        self._pairs: dict[str, frozenset[tuple[int, int]]] = {}

    def annotate(self) -> None:
        """Add arithmetic, workspace, and pairs of buffers where it may write over an input."""
        for kernel in self._table.kernels:
            kernel.flops = library_flops(self._table, kernel)
            kernel.workspace = library_workspace(self._table, kernel)
            kernel.inplace += [
                (source, target)
                for source, target in self._buffer_pairs(kernel)
                if self._table.buffers[source].bytes == self._table.buffers[target].bytes
            ]

    def may_overwrite(self, kernel: KernelCall, source: int, target: int) -> bool:
        """Whether the kernel may write the output `target` in the place of its input `source`."""
        return (source, target) in set(self._buffer_pairs(kernel))

    def _buffer_pairs(self, kernel: KernelCall) -> list[tuple[int, int]]:
        if isinstance(kernel.callee, tvm.ir.GlobalVar):
            pairs = self._parameter_pairs(kernel.callee)
        else:
            pairs = library_overwrites(kernel)
        if not pairs:
            return []
        views = [value if kind == "view" else None for kind, value in kernel.arguments]
        buffers = [None if view is None else self._table.views[view].buffer for view in views]
        found = []
        for source, target in sorted(pairs):
            first, second = buffers[source], buffers[target]
            if first is not None and second is not None and buffers.count(first) == 1:
                found.append((first, second))
        return found

    def _parameter_pairs(self, callee: tvm.ir.GlobalVar) -> frozenset[tuple[int, int]]:
        name = callee.name_hint
        if name not in self._pairs:
            function = self._mod[callee]
            pairs: frozenset[tuple[int, int]] = frozenset()
            if isinstance(function, tirx.PrimFunc):
                pairs = frozenset(inplace_pairs(function))
            self._pairs[name] = pairs
        return self._pairs[name]
