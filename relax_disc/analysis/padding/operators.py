"""What each operator of a step does with rows: the same with each, a sum over them, or anything.

An operator that goes row by row computes packed rows as well: called with packed operands, it makes
the packed result.  A sum over rows needs only those that are not zero.  Whatever is not known here
needs every row of its operands, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tvm
from tvm import relax

from relax_disc.analysis.kernels.stages import constant
from relax_disc.analysis.padding.grid import NO_ROWS, Grid, Rows
from relax_disc.analysis.padding.kernel_rows import kernel_rows
from relax_disc.analysis.padding.support import NOWHERE, Support, in_all, in_any
from relax_disc.ops import registry

Effect = Literal["by_row", "sum", "island", "any"]

_NOT_ZERO = "it adds up rows that are not zero where nothing counts"
_SUMMED = ("float32", "float64")  # rows of these are added up by position
_MOVES = ("relax.reshape", "relax.expand_dims", "relax.squeeze")
_RESHAPED = ("relax.reshape", "relax.broadcast_to")


@dataclass(frozen=True, slots=True)
class Use:
    """What a call does with the rows of its operands.

    ``support``: of each result that has rows; of the rows that are added up for a ``"sum"``.
    ``reason``: of an effect ``"any"``. An ``"island"`` is computed whole from rows that are
    laid out in the padded batch: see :mod:`relax_disc.analysis.padding.islands`.
    """

    effect: Effect
    support: tuple[Support, ...] = (None,)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a call reads."""

    kind: Any  # its type
    rows: Rows
    support: Support
    constant: float | None = None  # the number that all its elements are


def describe(
    call: relax.Call, operands: Sequence[Operand], grid: Grid, module: tvm.IRModule
) -> Use:
    """Say what a call does with rows; not for the operators that decide which rows count."""
    name = call.op.name
    if any(operand.rows.layout == "odd" for operand in operands):
        return Use("any", reason="an operand has the batch or the length in more axes than one")
    spreads = name in _ELEMENTWISE or name == "relax.broadcast_to"
    if not spreads and any(operand.rows.layout == "batch" for operand in operands):
        return Use("any", reason="it reads something that there is one of for each sequence")
    if name == "relax.call_tir":
        return _kernel(call, operands, grid, module)
    results = [call.ty] if isinstance(call.ty, relax.TensorType) else list(call.ty.fields)
    rows = [grid.rows(kind) for kind in results]
    if any(each.layout == "odd" for each in rows):
        return Use("any", reason="its result has the batch or the length in another way")
    if name not in _RESHAPED and any(map(grid.mentions_sizes, call.args)):
        return Use("any", reason="it computes with the sizes of the batch")
    if name == "relax_disc.embedding_backward":
        grad, ids = operands
        if not grad.rows.has_rows or (grad.rows != ids.rows):
            return Use("any", reason="it adds up rows of another kind")
        return _sum(grad.support)
    if spreads:
        return _elementwise(name, results[0], rows[0], operands)
    support = operands[0].support if operands else None
    if name in _MOVES:
        strides = [
            grid.strides(kind.shape.values, each)
            for kind, each in ((results[0], rows[0]), (operands[0].kind, operands[0].rows))
        ]
        if strides[0] is not None and strides[0] == strides[1] and rows[0].has_rows:
            return Use("by_row", (support,))
        return Use("any", reason="it moves rows to other places")
    if name == "relax.permute_dims":
        return Use("by_row", (support,))
    if name in ("relax_disc.logsumexp", "relax_disc.logsumexp_backward"):
        return Use("by_row", (support if name.endswith("backward") else None,))
    if name in _REDUCTIONS:
        return _reduction(name, call, operands[0], grid)
    if name in ("relax.nn.softmax", "relax.nn.log_softmax"):
        axis = int(call.attrs.axis) % len(operands[0].kind.shape.values)
        return _across(axis, operands[0].rows, (None,))
    if name == "relax.concat":
        axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
        axis %= len(results[0].shape.values)
        if any(operand.rows != rows[0] for operand in operands):
            return Use("any", reason="it joins tensors with other rows")
        return _across(axis, rows[0], (in_any([operand.support for operand in operands]),))
    if name == "relax.split":
        axis = int(call.attrs.axis) % len(results[0].shape.values)
        return _across(axis, operands[0].rows, (support,) * len(results))
    if name == "relax.strided_slice":
        axes = [constant(axis) for axis in call.args[1].fields]
        rank = len(results[0].shape.values)
        if any(axis is None or axis % rank in operands[0].rows.axes for axis in axes):
            return Use("any", reason="it takes a part of the rows")
        return Use("by_row", (support,))
    if name == "relax.matmul":
        return _product(operands)
    return Use("any", reason=f"{name} is not known to go row by row")


def reads_zero(name: str, position: int) -> bool:
    """Whether the support of an operator's result follows from that of one of its operands.

    Not so of numbers that are indices or divisors: zero is not a value of theirs.
    """
    return name in _KEEP_ZERO or (name in _KEEP_FIRST_ZERO and position == 0)


def has_zero(kind: Any) -> bool:
    """Whether the support of what a kernel makes may follow from that of such an operand.

    Integers may be indices in it.
    """
    return "int" not in registry.dtype_name(kind)


def _sum(support: Support) -> Use:
    return Use("any", reason=_NOT_ZERO) if support is None else Use("sum", (support,))


def _across(axis: int, rows: Rows, support: tuple[Support, ...]) -> Use:
    if axis in rows.axes:
        return Use("any", reason="it works across rows")
    return Use("by_row", support)


def _elementwise(name: str, result: Any, rows: Rows, operands: Sequence[Operand]) -> Use:
    rank = len(result.shape.values)
    for operand in operands:
        shift = rank - len(operand.kind.shape.values)
        own = operand.rows
        for axis, wanted in ((own.batch, rows.batch), (own.length, rows.length)):
            if axis != -1 and axis + shift != wanted:
                return Use("any", reason="it combines rows with others")
        if own.layout == "batch" and (rows.layout != "both" or rows.length < shift):
            return Use("any", reason="it combines rows with others")
        if "merged" in (own.layout, rows.layout) and own.layout not in (rows.layout, "none"):
            return Use("any", reason="it combines rows with others")
    support = [NOWHERE if operand.constant == 0.0 else operand.support for operand in operands]
    if name == "relax.multiply":
        found = in_all(support)
    elif name == "relax.where":
        found = in_any([in_all(support[:2]), support[2]])
    elif name in _ADDED:
        found = in_any(support)
    elif name in ("relax.divide", "relax.broadcast_to") or name in _ZERO_AT_ZERO:
        found = support[0]
    else:
        found = None
    return Use("by_row", (found,))


def _reduction(name: str, call: relax.Call, operand: Operand, grid: Grid) -> Use:
    rank = len(operand.kind.shape.values)
    named = call.attrs.axis
    axes = set(range(rank)) if named is None else {int(axis) % rank for axis in named}
    over = axes & operand.rows.axes
    if not over:
        return Use("by_row", (operand.support if name in ("relax.sum", "relax.mean") else None,))
    if over != operand.rows.axes:
        # By position, or by sequence.
        is_first = operand.rows == Rows("both", 0, 1, operand.rows.of)
        by_one = axes == {1} or (axes == {0} and grid.cut(operand.rows.of) is None)
        is_summed = name == "relax.sum" and registry.dtype_name(operand.kind) in _SUMMED
        if is_first and by_one and is_summed:
            return _sum(operand.support)
        return Use("any", reason="it adds up a part of the rows")
    if name not in ("relax.sum", "relax.mean") or (
        name == "relax.mean" and operand.support is None
    ):
        return Use("any", reason=f"{name.removeprefix('relax.')} over all rows, counted or not")
    return _sum(operand.support)


def _product(operands: Sequence[Operand]) -> Use:
    left, right = operands
    ranks = [len(operand.kind.shape.values) for operand in operands]
    if min(ranks) < 2:
        return Use("any", reason="a product with a vector")
    inner = (ranks[0] - 1, ranks[1] - 2)
    if left.rows.layout == right.rows.layout == "merged":
        if (left.rows.batch, right.rows.batch) != inner or ranks != [2, 2]:
            return Use("any", reason="a product of rows with rows")
        return _sum(in_all([left.support, right.support]))
    if left.rows != NO_ROWS and right.rows != NO_ROWS:
        return Use("any", reason="a product of rows with rows")
    rows, own = (left, 0) if left.rows != NO_ROWS else (right, 1)
    if ranks[1 - own] != 2 or inner[own] in rows.rows.axes:
        return Use("any", reason="it adds up rows")
    return Use("by_row", (rows.support,))


def _kernel(call: relax.Call, operands: Sequence[Operand], grid: Grid, module: tvm.IRModule) -> Use:
    kind = call.ty_args[0]
    results = list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]
    found = kernel_rows(
        module[call.args[0]],
        [operand.rows for operand in operands],
        [grid.rows(each) for each in results],
        [operand.support if has_zero(operand.kind) else None for operand in operands],
    )
    if found is None:
        name = call.args[0].name_hint
        return Use("any", reason=f"the kernel {name} is not known to go row by row")
    return Use("by_row", found)


_ZERO_AT_ZERO = frozenset(
    f"relax.{name}"
    for name in "negative astype abs sqrt sin tan tanh erf sign floor ceil round trunc asin atan "
    "sinh asinh square nn.relu nn.leakyrelu nn.gelu nn.gelu_tanh nn.silu".split()
)
_ADDED = frozenset(f"relax.{name}" for name in "add subtract maximum minimum concat".split())
_KEEP_ZERO = _ADDED | {"relax.multiply", "relax.where", "relax.matmul"}
_KEEP_FIRST_ZERO = _ZERO_AT_ZERO.union(
    _MOVES,
    _RESHAPED,
    ["relax_disc.embedding_backward", "relax_disc.logsumexp_backward"],
    [f"relax.{name}" for name in "divide permute_dims sum mean split strided_slice".split()],
)
_ELEMENTWISE = _ZERO_AT_ZERO | frozenset(
    f"relax.{name}"
    for name in "add subtract multiply divide floor_divide power maximum minimum mod floor_mod "
    "equal not_equal less less_equal greater greater_equal logical_and logical_or logical_xor "
    "logical_not bitwise_and bitwise_or bitwise_xor bitwise_not where clip exp log rsqrt sigmoid "
    "cos acos cosh acosh atanh isnan isinf isfinite nn.softplus log_add_exp".split()
)
_REDUCTIONS = frozenset(f"relax.{name}" for name in "sum mean max min prod variance std".split())
