"""What is known of the values of a Relax function while the shape graph reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx

from relax_disc.analysis.symbolic.expr import SymbolicExpr, as_expr

Shape = tuple[SymbolicExpr, ...]


@dataclass(frozen=True, slots=True)
class TensorFact:
    """Shape and dtype of a tensor; ``shape`` None is a shape that nobody knows."""

    shape: Shape | None
    dtype: str

    @property
    def elements(self) -> SymbolicExpr:
        """Number of elements."""
        return count_elements(self.shape or ())

    @property
    def bytes(self) -> SymbolicExpr:
        """Size in bytes, rounded up to whole bytes."""
        bits = tvm.DataType(self.dtype).bits * tvm.DataType(self.dtype).lanes
        if bits % 8 == 0:
            return self.elements * (bits // 8)
        return (self.elements * bits + 7) // 8


@dataclass(frozen=True, slots=True)
class TupleFact:
    """Facts of the fields of a tuple."""

    fields: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class ShapeFact:
    """A shape as a value; None where even the number of dims is unknown."""

    shape: Shape | None


@dataclass(frozen=True, slots=True)
class ScalarFact:
    """An integer that is a size, passed as a value."""

    size: SymbolicExpr


@dataclass(frozen=True, slots=True)
class OtherFact:
    """A value that has nothing to do with sizes: an object, a callee, a float."""


Fact = TensorFact | TupleFact | ShapeFact | ScalarFact | OtherFact


def count_elements(shape: Shape) -> SymbolicExpr:
    """Return the number of elements of a shape."""
    product = as_expr(1)
    for size in shape:
        product = product * size
    return product


def fact_of_type(
    kind: Any, size: Callable[[Any], SymbolicExpr], value: Callable[[Any], Fact]
) -> Fact:
    """Return what a Relax type tells.

    ``size``: translates the expression of a size. ``value``: gives the fact of a variable: a type
    may name a variable that holds the shape.
    """
    match kind:
        case relax.TensorType():
            shape = None
            if isinstance(kind.shape, relax.ShapeExpr):
                shape = tuple(map(size, kind.shape.values))
            elif isinstance(kind.shape, relax.Var):
                held = value(kind.shape)
                shape = held.shape if isinstance(held, ShapeFact) else None
            elif kind.ndim == 0:
                shape = ()
            return TensorFact(shape, str(kind.dtype))
        case relax.TupleType():
            return TupleFact(tuple(fact_of_type(field, size, value) for field in kind.fields))
        case relax.ShapeType():
            return ShapeFact(None if kind.values is None else tuple(map(size, kind.values)))
    return OtherFact()


def is_size(expr: Any) -> bool:
    """Whether an expression is an integer scalar, which may be a size."""
    kind = getattr(expr, "ty", None)
    return isinstance(kind, tvm.ir.PrimType) and str(kind.dtype) in ("int64", "int32")


def tensors_of(fact: Fact) -> list[TensorFact]:
    """Return all tensors in a value, in order."""
    if isinstance(fact, TensorFact):
        return [fact]
    if isinstance(fact, TupleFact):
        return [tensor for field in fact.fields for tensor in tensors_of(field)]
    return []


def declared_ranges(func: relax.Function) -> dict[str, tuple[int, int, int]]:
    """Return lower, upper (-1 for none) and divisor that a function's attributes declare."""
    attrs = dict(func.attrs) if func.attrs is not None else {}
    ranges: dict[str, tuple[int, int, int]] = {}
    lowers = {str(k): int(v) for k, v in dict(attrs.get("tir_var_lower_bound") or {}).items()}
    uppers = {str(k): int(v) for k, v in dict(attrs.get("tir_var_upper_bound") or {}).items()}
    for name in sorted(lowers.keys() | uppers.keys()):
        ranges[name] = (lowers.get(name, 1), uppers.get(name, -1), 1)
    for name, values in dict(attrs.get("relax_disc.dims") or {}).items():
        lower, upper, divisor = (int(value) for value in values)
        ranges[str(name)] = (lower, upper, divisor)
    return ranges


def size_pairs(kind: Any, fact: Fact) -> list[tuple[Any, SymbolicExpr]]:
    """Pair the sizes that a parameter's type names with those of an argument."""
    if isinstance(kind, tirx.Var):  # a scalar parameter, which is a dim itself
        return [(kind, fact.size)] if isinstance(fact, ScalarFact) else []
    if isinstance(kind, relax.TupleType) and isinstance(fact, TupleFact):
        fields = zip(kind.fields, fact.fields, strict=False)
        return [pair for field, inner in fields for pair in size_pairs(field, inner)]
    if isinstance(kind, relax.ShapeType):
        sizes = kind.values
    else:
        sizes = getattr(kind, "shape", None)
    if isinstance(sizes, relax.ShapeExpr):
        sizes = sizes.values
    known = fact.shape if isinstance(fact, TensorFact | ShapeFact) else None
    if sizes is None or isinstance(sizes, relax.Var) or known is None or len(sizes) != len(known):
        return []
    return list(zip(sizes, known, strict=True))


def kernel_operands(arguments: Sequence[Fact]) -> list[Fact]:
    """Return what call_tir passes to a kernel, one for each parameter."""
    operands: list[Fact] = []
    for fact in arguments:
        if isinstance(fact, TupleFact):
            operands += kernel_operands(fact.fields)
        elif isinstance(fact, ShapeFact):
            operands += [ScalarFact(size) for size in fact.shape or ()]
        else:
            operands.append(fact)
    return operands


def is_unknown(fact: Fact) -> bool:
    """Whether the shape of some tensor in a value is unknown."""
    return any(tensor.shape is None for tensor in tensors_of(fact))
