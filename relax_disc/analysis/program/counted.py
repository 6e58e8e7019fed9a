"""Dims that a function counts: which kernel does, and what must come after it.

A call enters such a dim with its bound; from the kernel on it has its size.  A kernel that mentions
the dim would compute with the bound if it ran before, even where it reads nothing that was counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relax_disc.analysis.program.table import FunctionTable, KernelCall, NotPlannableError
from relax_disc.analysis.symbolic.comparison.compare import at_most
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import Atom, SymbolicExpr
from relax_disc.ops.counted import COUNTING_KERNELS
from relax_disc.vm_builtins.guard import GUARD


def counted_dims(table: FunctionTable, names: Sequence[str]) -> dict[str, int]:
    """Return the kernel that counts each dim, by the dim's name.

    Raises `NotPlannableError`: no kernel does.
    """
    found: dict[str, int] = {}
    for k, name in counting_kernels(table).items():
        found.setdefault(name, k)
    missing = [name for name in names if name not in found]
    if missing:
        raise NotPlannableError(f"{table.name}: no kernel counts {missing[0]}")
    return {name: found[name] for name in names}


def counting_kernels(table: FunctionTable) -> dict[int, str]:
    """Return the dim that each kernel counts; those after the first must find the same."""
    return {k: _dim_of(table, x) for k, x in enumerate(table.kernels) if x.name in COUNTING_KERNELS}


def _dim_of(table: FunctionTable, kernel: KernelCall) -> str:
    output = kernel.outputs[0]
    views = (table.views[value] for kind, value in kernel.arguments if kind == "view")
    return str(next(view for view in views if view.buffer == output).shape[0])


def order_behind_counts(table: FunctionTable) -> None:
    """Put every kernel that mentions a counted dim behind the kernel that counts it.

    Raises `NotPlannableError`: a tensor's size may grow where the dim falls.
    """
    if not table.counted:
        return
    for buffer in table.buffers:
        if not all(_grows_with(buffer.bytes, name) for name in table.counted):
            raise NotPlannableError(
                f"{table.name}: the size {buffer.bytes} of {buffer.name} is not largest where "
                f"{', '.join(table.counted)} are"
            )
    counting = set(counting_kernels(table))
    for k, kernel in enumerate(table.kernels):
        if kernel.name == GUARD:  # whatever is refused, nothing has been written
            kernel.after |= counting
        mentioned = {dim.name for expr in _sizes(table, kernel) for dim in expr.free_dims}
        kernel.after |= {table.counted[name] for name in mentioned & table.counted.keys()} - {k}


def _grows_with(size: SymbolicExpr, name: str) -> bool:
    """Whether a size is proved not to fall as a dim grows.

    It is a sum of products: each of what the dim makes grow, none of it negative, and of a factor
    without the dim that is not negative either.
    """
    factors: dict[tuple[str, ...], SymbolicExpr] = {}
    for monomial, coefficient in size.terms.items():
        moving = tuple(x for x in monomial if _mentions(size.symbols[x], name))
        factor = SymbolicExpr.constant(coefficient)
        for other in monomial:
            if other not in moving:
                factor *= _expression(size.symbols[other])
        factors[moving] = factors.get(moving, SymbolicExpr()) + factor
    return all(
        not moving
        or (_is_positive(factor) and all(_moves_up(size.symbols[x], name) for x in moving))
        for moving, factor in factors.items()
    )


def _moves_up(symbol: SymbolicDim | Atom, name: str) -> bool:
    """Whether a factor is not negative and grows with a dim that it mentions."""
    if isinstance(symbol, SymbolicDim):
        return True
    parts = symbol.args[:1] if symbol.kind == "floordiv" else symbol.args
    fixed = symbol.args[len(parts) :]
    enough = any if symbol.kind == "max" else all
    return (
        symbol.kind != "mod"
        and not any(_mentions(part, name) for part in fixed)
        and all(_grows_with(part, name) for part in parts)
        and enough(map(_is_positive, parts))
    )


def _mentions(value: SymbolicDim | Atom | SymbolicExpr, name: str) -> bool:
    dims = (value,) if isinstance(value, SymbolicDim) else value.free_dims
    return any(dim.name == name for dim in dims)


def _expression(symbol: SymbolicDim | Atom) -> SymbolicExpr:
    if isinstance(symbol, SymbolicDim):
        return SymbolicExpr.dim(symbol)
    return SymbolicExpr.parse(str(symbol), symbol.free_dims)


def _is_positive(expr: SymbolicExpr) -> bool:
    """Whether an expression is proved to be 0 or more."""
    return at_most(SymbolicExpr(), expr)


def _sizes(table: FunctionTable, kernel: KernelCall) -> Iterator[SymbolicExpr]:
    for kind, value in kernel.arguments:
        if kind == "view":
            yield from table.views[value].shape
        elif kind == "integer":
            yield value
        elif kind == "shape":
            yield from value
