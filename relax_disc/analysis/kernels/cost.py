"""Arithmetic of library calls as expressions of the dims; generated kernels are bound by memory.

The cost model takes the larger of the time for arithmetic and the time to move the bytes, so only
kernels that do much more than one pass over their operands need a count here.  Costs guide the
choice of what to compute again; they never touch results.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from relax_disc.analysis.program.table import FunctionTable, KernelCall, View
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.vm_builtins.libraries import vocabulary_head

_Count = Callable[[list[View], list[int]], SymbolicExpr]


def library_flops(table: FunctionTable, kernel: KernelCall) -> SymbolicExpr:
    """Floating-point operations of a library call; 0 for any other kernel.

    Parameters
    ----------
    table : FunctionTable
        Where the kernel's views are.
    kernel : KernelCall
        With its arguments.
    """
    family, _, operation = kernel.name.rpartition(".")
    count = _COUNTS.get(operation) if family.startswith("relax_disc.") else None
    if count is None:
        return SymbolicExpr()
    views = [table.views[value] for kind, value in kernel.arguments if kind == "view"]
    numbers = [
        value.as_int()
        for kind, value in kernel.arguments
        if kind == "integer" and value.is_constant
    ]
    return count(views, numbers)


def _elements(shape: tuple[SymbolicExpr, ...]) -> SymbolicExpr:
    return prod(shape, start=SymbolicExpr(1))


def _matmul(views: list[View], numbers: list[int]) -> SymbolicExpr:
    left, right = views[0], views[1]
    _, split, _, is_transposed = numbers[:4]
    columns = right.shape[:split] if is_transposed else right.shape[split:]
    return 2 * _elements(left.shape) * _elements(columns)


def _batch_matmul(views: list[View], numbers: list[int]) -> SymbolicExpr:
    left, result = views[0], views[-1]
    inner = left.shape[numbers[0] & 15]  # the last digit of the axes' code
    return 2 * _elements(result.shape) * inner


def _attention(products: int, key: int) -> _Count:
    """Count an attention of so many products of length x length x depth; halved where causal."""

    def count(views: list[View], numbers: list[int]) -> SymbolicExpr:
        is_causal, layout = numbers[:2]
        length = views[key].shape[1 if layout >> key & 1 else 2]
        whole = products * _elements(views[0].shape) * length
        return whole if is_causal else 2 * whole

    return count


def _vocabulary_head(products: int) -> _Count:
    """Count so many products of rows x classes x width; the rows are those of the input."""

    def count(views: list[View], numbers: list[int]) -> SymbolicExpr:
        del numbers
        return 2 * products * _elements(views[0].shape) * views[1].shape[0]

    return count


def _recurrence(views: list[View], numbers: list[int]) -> SymbolicExpr:
    """Count the recurrent products: what the weight has for each row of the first operand."""
    del numbers
    rows = views[0].shape[0] * views[0].shape[1]
    weight = next(view for view in views if len(view.shape) == 2)
    return 2 * rows * _elements(weight.shape)


_COUNTS: dict[str, _Count] = {
    "matmul": _matmul,
    "recurrence": _recurrence,
    "recurrence_backward": _recurrence,
    "matmul_add": _matmul,
    "batch_matmul": _batch_matmul,
    **{
        name: _vocabulary_head(2 if name.endswith("_frozen") else 3)
        for name in vocabulary_head.NAMES
    },
    "attention": _attention(2, key=1),
    "attention_masked": _attention(2, key=1),
    "attention_backward": _attention(5, key=2),
    "attention_backward_masked": _attention(5, key=2),
}
