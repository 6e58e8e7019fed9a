"""What passes ask about kernels that compute element by element, and about the sizes of values."""

from __future__ import annotations

import functools
from typing import Any

import tvm
from tvm import ir, relax, tirx

from relax_disc.analysis.kernels.stages import nodes_of
from relax_disc.analysis.symbolic.comparison.compare import at_most
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.analysis.symbolic.from_tirx import elements
from relax_disc.errors import GraphError
from relax_disc.ops.registry import dtype_name, itemsize

# TVM's kinds of kernels: one element for each element of operands that may be smaller or permuted;
# and sums of such.
INJECTIVE, REDUCTION = 2, 3
# A computation that costs more per element than writing and reading it is not repeated.
MOST_WORK = 32
_CALL_WORK = 8  # exp, tanh, erf
# Operands so much smaller than a value do not count beside it.
_SMALL = 8
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
CALL_TIR = ir.Op.get("relax.call_tir")


def kernel_of(mod: tvm.IRModule, value: Any) -> Any:
    """Return the kernel of a `call_tir` with one result; None for anything else."""
    is_kernel = isinstance(value, relax.Call) and value.op == CALL_TIR
    is_single = is_kernel and isinstance(value.ty_args[0], relax.TensorType)
    return mod[value.args[0]] if is_single else None


def pattern_of(mod: tvm.IRModule, value: relax.Expr | None) -> int:
    """TVM's kind of a kernel; what is no kernel cannot be fused."""
    kernel = kernel_of(mod, value)
    pattern = None if kernel is None else (kernel.attrs or {}).get("op_pattern")
    return REDUCTION + 1 if pattern is None else int(pattern)


def work_of(mod: tvm.IRModule, value: relax.Expr) -> int:
    """Count a kernel's operations for one element."""
    return _work_in(kernel_of(mod, value).body)


@functools.lru_cache(maxsize=1024)  # several passes ask about the same kernels
def _work_in(body: tirx.Stmt) -> int:
    work = sum(str(node.ty) != "int64" for node in nodes_of(_ARITHMETIC, body))
    names = [getattr(node.op, "name", "") for node in nodes_of(ir.Call, body)]
    return work + _CALL_WORK * sum(not name.endswith("if_then_else") for name in names)


def compares(mod: tvm.IRModule, value: relax.Expr) -> bool:
    """Whether a kernel compares elements of two tensors: by rounding, equal ones may differ."""
    kernel = kernel_of(mod, value)
    return kernel is not None and _compares_in(kernel.body)


@functools.lru_cache(maxsize=1024)
def _compares_in(body: tirx.Stmt) -> bool:
    return any(
        "float" in str(node.a.ty) and not (_is_one_number(node.a) or _is_one_number(node.b))
        for node in nodes_of(_COMPARISONS, body)
    )


def _is_one_number(value: Any) -> bool:
    is_scalar = isinstance(value, ir.TensorLoad) and not value.indices
    return is_scalar or isinstance(value, tirx.FloatImm)


@functools.lru_cache(maxsize=16384)  # a variable is asked about again and again
def elements_of(variable: relax.Var) -> SymbolicExpr | None:
    """Number of elements of a tensor; None where it is not known as a polynomial."""
    shape: Any = getattr(variable.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return None
    try:
        return elements(shape.values)
    except GraphError:
        return None


def bytes_of(variable: relax.Var) -> SymbolicExpr | None:
    """Size of a tensor in bytes; None where it is not known as a polynomial."""
    size = elements_of(variable)
    return None if size is None else size * itemsize(dtype_name(variable.ty))


def is_small_beside(operand: relax.Var, value: relax.Var) -> bool:
    """Whether reading an operand is next to nothing beside reading a value."""
    small, large = bytes_of(operand), bytes_of(value)
    if small is None or large is None:
        return False
    return at_most(small * _SMALL, large) or (small.is_constant and not large.is_constant)
