"""What plans know of library calls: arithmetic, scratch memory, which results may lie over inputs.

Each function's own file in `relax_disc.ops` says it; here the arguments of a call are read.  The
cost model takes the larger of the time for arithmetic and the time to move the bytes, so only
functions that do much more than one pass over their operands count arithmetic.  The formulas of
scratch memory are the native library's (`src/kernels/workspace.cc`), since they follow from the
block sizes of its kernels on the processor at hand.
"""

from __future__ import annotations

from relax_disc import ops  # noqa: F401  fills the table
from relax_disc.analysis.program.table import FunctionTable, KernelCall, View, dtype_bytes
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.ops import aten
from relax_disc.ops.registry import LIBRARY, LibraryFunction

Workspace = tuple[str, tuple[SymbolicExpr, ...]]

_CPU = "relax_disc.cpu."


def library_flops(table: FunctionTable, kernel: KernelCall) -> SymbolicExpr:
    """Floating-point operations of a library call; 0 for any other kernel."""
    count = _known(kernel).flops
    return SymbolicExpr() if count is None else _expression(count(*_arguments(table, kernel)))


def library_workspace(table: FunctionTable, kernel: KernelCall) -> Workspace:
    """Formula and parameters of a library call on the CPU; ``("", ())`` for any other kernel."""
    if kernel.name == aten.CALL:  # the bytes are its first number
        size = next(value for kind, value in kernel.arguments if kind == "integer")
        return "aten", (SymbolicExpr(1), size)
    read = _known(kernel).workspace
    if read is None or not kernel.name.startswith(_CPU):
        return "", ()
    views, numbers = _arguments(table, kernel)
    formula, parameters = read(views, numbers)
    return formula, (SymbolicExpr(dtype_bytes(views[0].dtype)), *map(_expression, parameters))


def library_overwrites(kernel: KernelCall) -> frozenset[tuple[int, int]]:
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
