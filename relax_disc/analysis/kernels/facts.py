"""What plans know of kernels: arithmetic, scratch memory, which results may lie over inputs.

A generated kernel's body says it, and of a library function its own file in `relax_disc.ops`; here
the arguments of its calls are read.  The cost model takes the larger of the time for arithmetic and
the time to move the bytes, so only functions that do much more than one pass over their operands
count arithmetic.  The formulas of scratch memory are the native library's
(`src/kernels/workspace.cc`), since they follow from the block sizes of its kernels on the processor
at hand.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from relax_disc import ops  # noqa: F401  fills the table
from relax_disc.analysis.kernels.inplace import inplace_pairs
from relax_disc.analysis.program.table import FunctionTable, KernelCall, View
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.devices import multiprocessors
from relax_disc.ops import aten, loop
from relax_disc.ops.registry import LIBRARY, LibraryFunction, itemsize

Workspace = tuple[str, tuple[SymbolicExpr, ...]]

_CPU, _CUDA = "relax_disc.cpu.", "relax_disc.cuda."


class KernelFacts:
    """Facts about the kernels of one function; PrimFuncs are analysed once each."""

    def __init__(self, mod: tvm.IRModule, table: FunctionTable) -> None:
        self._mod = mod
        self._table = table
        self._pairs: dict[str, frozenset[tuple[int, int]]] = {}

    def annotate(self) -> None:
        """Add arithmetic, workspace, and pairs of buffers where it may write over an input."""
        for kernel in self._table.kernels:
            kernel.flops = _library_flops(self._table, kernel)
            kernel.workspace = _library_workspace(self._table, kernel)
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
            pairs = _library_overwrites(kernel)
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


def _library_flops(table: FunctionTable, kernel: KernelCall) -> SymbolicExpr:
    """Floating-point operations of a library call; 0 for any other kernel."""
    count = _known(kernel).flops
    return SymbolicExpr() if count is None else _expression(count(*_arguments(table, kernel)))


def _library_workspace(table: FunctionTable, kernel: KernelCall) -> Workspace:
    """Formula and parameters of a library call; ``("", ())`` for any other kernel.

    On a GPU the formulas are ``"aten"``, and ``"aten_at_least"`` where nobody can tell all of it.
    """
    if kernel.name in (aten.CALL, loop.CALL):  # the bytes are its first number
        size = next(value for kind, value in kernel.arguments if kind == "integer")
        return "aten", (SymbolicExpr(1), size)
    if kernel.name.startswith(_CUDA):
        known = _known(kernel)
        if known.device_bytes is None:
            return "aten_at_least", (SymbolicExpr(1), SymbolicExpr(0))
        views = [table.views[value] for kind, value in kernel.arguments if kind == "view"]
        numbers = [
            value.as_int() if value.is_constant else value
            for kind, value in kernel.arguments
            if kind == "integer"
        ]
        units = multiprocessors(tvm.target.Target.current(allow_none=True))
        size = _expression(known.device_bytes(views, numbers, units))
        return "aten_at_least" if known.takes_more else "aten", (SymbolicExpr(1), size)
    read = _known(kernel).workspace
    if read is None or not kernel.name.startswith(_CPU):
        return "", ()
    views, numbers = _arguments(table, kernel)
    formula, parameters = read(views, numbers)
    return formula, (SymbolicExpr(itemsize(views[0].dtype)), *map(_expression, parameters))


def _library_overwrites(kernel: KernelCall) -> frozenset[tuple[int, int]]:
    """Arguments (input, output) of a library call on the CPU that may lie in one place."""
    return _known(kernel).overwrites if kernel.name.startswith(_CPU) else frozenset()


def _known(kernel: KernelCall) -> LibraryFunction:
    family, _, operation = kernel.name.rpartition(".")
    return LIBRARY.get(operation, _OTHER) if family.startswith("relax_disc.") else _OTHER


_OTHER = LibraryFunction()


def _expression(value: SymbolicExpr | int) -> SymbolicExpr:
    return SymbolicExpr(value) if isinstance(value, int) else value


def _arguments(table: FunctionTable, kernel: KernelCall) -> tuple[list[View], list[int]]:
    views = [table.views[value] for kind, value in kernel.arguments if kind == "view"]
    numbers = [
        value.as_int()
        for kind, value in kernel.arguments
        if kind == "integer" and value.is_constant
    ]
    return views, numbers
