"""See the tensor that is stored behind permutations and reshapes of an operand.

A library function that takes strides needs no transposed copy: what it gets is the tensor as
stored, and the permutation as a flag. The copies that nothing uses any more are dead code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard

import tvm
from tvm import relax, tirx
from tvm.sym.analyzer import Analyzer

from relax_disc.ops import registry

Definition = Callable[[relax.Expr], relax.Expr]


@dataclass(frozen=True, slots=True)
class MatrixView:
    """A stored tensor read as a matrix."""

    tensor: relax.Expr  # the tensor as stored
    split: int  # its first `split` axes are the rows, the others the columns
    transposed: bool  # whether the operand is the transpose of that matrix


@dataclass(frozen=True, slots=True)
class PermutedView:
    """A stored tensor with its axes permuted: logical axis i is stored axis `axes[i]`."""

    tensor: relax.Expr
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Uses:
    """Who computes and who uses each variable of a function."""

    definitions: dict[relax.Var, relax.Expr]  # expression that each variable is bound to
    # for each variable the bindings that use it, as (bound variable, value); the function's result
    # counts as a user, bound to None
    users: dict[relax.Var, list[tuple[relax.Var | None, relax.Expr]]]

    @staticmethod
    def of(function: relax.Function) -> Uses:
        """Collect the uses in a function."""
        uses = Uses({}, {})

        def note(variable: relax.Var | None, value: relax.Expr) -> None:
            for operand in operands_of(value):
                uses.users.setdefault(operand, []).append((variable, value))

        def read(body: relax.Expr) -> None:
            if not isinstance(body, relax.SeqExpr):
                return
            for binding in chain.from_iterable(block.bindings for block in body.blocks):
                value = binding.value
                for inner in _bodies_in(value):
                    read(inner)
                uses.definitions[binding.var] = value
                note(binding.var, value)
            note(None, body.body)

        read(function.body)
        return uses

    def users_of(self, variable: relax.Var | None) -> list[tuple[relax.Var | None, relax.Expr]]:
        """Users of a variable; of None, which stands for the result, there are none."""
        return [] if variable is None else self.users.get(variable, [])


def operands_of(value: relax.Expr) -> list[relax.Var]:
    """Variables that a value is computed from, dims apart, each once, in order."""
    found: dict[relax.Var, None] = {}

    # TVM's own visitor looks into types, too: twenty times the nodes.  Slices, because the iterator
    # of TVM's arrays takes three times as long.
    def visit(node: Any) -> None:
        role = _role(type(node))
        if role is relax.Var:
            if type(node.ty) is not tvm.ir.PrimType:
                found[node] = None
        elif role is relax.Call:
            visit(node.op)
            for part in node.args[:]:
                visit(part)
        elif role is relax.Tuple:
            for part in node.fields[:]:
                visit(part)
        elif role is relax.TupleGetItem:
            visit(node.tuple_value)
        elif role is not None:
            relax.analysis.post_order_visit(
                node, lambda x: visit(x) if isinstance(x, relax.Var) else None
            )

    visit(value)
    return list(found)


_ROLES = relax.Var, relax.Call, relax.Tuple, relax.TupleGetItem, relax.If, relax.Function


@functools.cache
def _role(kind: type) -> type | None:
    """Which of the nodes with operands a class is; ``isinstance`` of TVM's classes is slow."""
    return next((role for role in _ROLES if issubclass(kind, role)), None)


def _bodies_in(value: Any) -> tuple[relax.Expr, ...]:
    """Bodies inside a value: of a function, or both branches of a choice."""
    if isinstance(value, relax.If):
        return value.true_branch, value.false_branch
    return (value.body,) if isinstance(value, relax.Function) else ()


def definition(expr: relax.Expr, builder: relax.BlockBuilder) -> relax.Expr:
    """Follow variables, and elements of tuples that are written out, to what computes them."""
    while True:
        if isinstance(expr, relax.Var):
            value = builder.lookup_binding(expr)
            if value is None:
                return expr
            expr = value
        elif isinstance(expr, relax.TupleGetItem):
            whole = definition(expr.tuple_value, builder)
            if not isinstance(whole, relax.Tuple):
                return expr
            expr = whole.fields[expr.index]
        else:
            return expr


def is_call_of(expr: Any, name: str) -> TypeGuard[relax.Call]:
    """Whether an expression calls the operator `name`."""
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == name


def permutation_of(call: relax.Call) -> tuple[int, ...]:
    """Axes of a `permute_dims` call; all axes reversed when it names none."""
    rank = len(extents_of(call.args[0]))
    axes = call.attrs.axes
    if axes is None:
        return tuple(reversed(range(rank)))
    return tuple(int(axis) % rank for axis in axes)


def extents_of(expr: relax.Expr) -> list[tvm.ir.Expr]:
    """Extents of a tensor expression of known shape."""
    return registry.extents(registry.tensor_type(expr, "an operand"))


def matrix_view(
    expr: relax.Expr, rows: int, definition: Definition, analyzer: Analyzer
) -> MatrixView:
    """Read an operand as a matrix, its first `rows` axes as rows, through copies that only move.

    ``rows``: number of axes that are rows. ``definition``: maps a variable to the expression bound
    to it, others to themselves.
    """
    transposed = False
    while True:
        value = definition(expr)
        if is_call_of(value, "relax.permute_dims"):
            axes = permutation_of(value)
            columns = len(axes) - rows
            if axes != (*range(columns, len(axes)), *range(columns)):
                break  # not a swap of all rows with all columns
            expr, rows, transposed = value.args[0], columns, not transposed
        elif is_call_of(value, "relax.reshape"):
            split = _same_split(expr, rows, value.args[0], analyzer)
            if split is None:
                break
            expr, rows = value.args[0], split
        else:
            break
    return MatrixView(expr, rows, transposed)


def permuted_view(expr: relax.Expr, definition: Definition) -> PermutedView:
    """Read an operand through permutations of its axes."""
    axes = tuple(range(len(extents_of(expr))))
    while is_call_of(value := definition(expr), "relax.permute_dims"):
        inner = permutation_of(value)
        axes = tuple(inner[axis] for axis in axes)
        expr = value.args[0]
    return PermutedView(expr, axes)


def same_shape(left: relax.Expr, right: relax.Expr, analyzer: Analyzer) -> bool:
    """Whether two tensors provably have the same shape."""
    a, b = extents_of(left), extents_of(right)
    return len(a) == len(b) and all(
        analyzer.can_prove_equal(x, y) for x, y in zip(a, b, strict=True)
    )


def _same_split(
    reshaped: relax.Expr, rows: int, source: relax.Expr, analyzer: Analyzer
) -> int | None:
    """Number of axes of `source` that make up the same rows, None if none do."""
    target, stored = extents_of(reshaped), extents_of(source)
    wanted = _product(target[:rows])
    columns = _product(target[rows:])
    for split in range(len(stored) + 1):
        if analyzer.can_prove_equal(_product(stored[:split]), wanted):
            # With an extent of zero the rows alone would not settle the columns.
            if analyzer.can_prove_equal(_product(stored[split:]), columns):
                return split
    return None


def _product(extents: Sequence[Any]) -> Any:
    result: Any = tirx.const(1, "int64")
    for extent in extents:
        result = result * extent
    return result
