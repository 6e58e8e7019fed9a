"""Which memory library calls need beside their arguments: a formula, and its parameters.

The formulas are the native library's (`src/kernels/workspace.cc`), since they follow from the block
sizes of its kernels on the processor at hand; here their parameters are read off a call.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from relax_disc.analysis.program.table import FunctionTable, KernelCall, View, dtype_bytes
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.vm_builtins.libraries import vocabulary_head

Workspace = tuple[str, tuple[SymbolicExpr, ...]]

_NONE: Workspace = ("", ())
_FAMILY = "relax_disc.cpu."


def library_workspace(table: FunctionTable, kernel: KernelCall) -> Workspace:
    """Formula and parameters of a library call; ``("", ())`` for any other kernel.

    Parameters
    ----------
    table : FunctionTable
        Where the kernel's views are.
    kernel : KernelCall
        With its arguments.
    """
    read = _READERS.get(kernel.name.removeprefix(_FAMILY))
    if read is None or not kernel.name.startswith(_FAMILY):
        return _NONE
    views = [table.views[value] for kind, value in kernel.arguments if kind == "view"]
    numbers = [
        value.as_int()
        for kind, value in kernel.arguments
        if kind == "integer" and value.is_constant
    ]
    formula, parameters = read(views, numbers)
    return formula, (SymbolicExpr(dtype_bytes(views[0].dtype)), *parameters)


def _elements(shape: tuple[SymbolicExpr, ...]) -> SymbolicExpr:
    return prod(shape, start=SymbolicExpr(1))


def _matmul(views: list[View], numbers: list[int]) -> Workspace:
    """Rows, columns and depth of a product of matrices."""
    left, right = views[:2]
    left_split, right_split, left_transposed, right_transposed = numbers[:4]
    rows, depth = _elements(left.shape[:left_split]), _elements(left.shape[left_split:])
    if left_transposed:
        rows, depth = depth, rows
    columns = right.shape[:right_split] if right_transposed else right.shape[right_split:]
    return "matmul", (rows, _elements(columns), depth)


def _batch_matmul(views: list[View], numbers: list[int]) -> Workspace:
    """Count, rows, columns and depth of products of matrices."""
    left, result = views[0], views[-1]
    left_axes, _, result_axes = numbers[:3]
    rows, columns = (result.shape[result_axes >> shift & 15] for shift in (4, 0))
    rank = len(result.shape)
    batch = [result.shape[result_axes >> 4 * axis & 15] for axis in range(2, rank)]
    return "batch_matmul", (_elements(tuple(batch)), rows, columns, left.shape[left_axes & 15])


def _attention(formula: str, key: int, value: int) -> Callable[[list[View], list[int]], Workspace]:
    """Widths of the heads of keys and of values."""

    def read(views: list[View], numbers: list[int]) -> Workspace:
        del numbers
        return formula, (views[key].shape[3], views[value].shape[3])

    return read


def _recurrence(formula: str, state: int) -> Callable[[list[View], list[int]], Workspace]:
    """Batch, width, and rows of the weight of a recurrent layer; the weight follows the state."""

    def read(views: list[View], numbers: list[int]) -> Workspace:
        del numbers
        rows, width = views[state + 1].shape
        return formula, (views[state].shape[1], width, rows)

    return read


def _ctc_loss_backward(views: list[View], numbers: list[int]) -> Workspace:
    """Labels that there is room for."""
    del numbers
    return "ctc_loss_backward", (views[2].shape[1],)


def _sort(views: list[View], numbers: list[int]) -> Workspace:
    """Length of the rows to sort."""
    del numbers
    return "sort", (views[0].shape[-1],)


def _vocabulary_head(views: list[View], numbers: list[int]) -> Workspace:
    """Rows of a linear head: all else is in its last result."""
    del numbers
    return "vocabulary_head", (_elements(views[2].shape),)


_READERS: dict[str, Callable[[list[View], list[int]], Workspace]] = {
    "matmul": _matmul,
    "matmul_add": _matmul,
    "batch_matmul": _batch_matmul,
    "recurrence": _recurrence("recurrence", state=1),
    "recurrence_backward": _recurrence("recurrence_backward", state=2),
    "ctc_loss_backward": _ctc_loss_backward,
    "sort": _sort,
    **dict.fromkeys(vocabulary_head.NAMES, _vocabulary_head),
    "attention": _attention("attention", key=1, value=2),
    "attention_masked": _attention("attention", key=1, value=2),
    "attention_backward": _attention("attention_backward", key=2, value=3),
    "attention_backward_masked": _attention("attention_backward", key=2, value=3),
}
