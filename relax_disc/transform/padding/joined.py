"""Kernels of batches that are joined to one, for a batch of one sequence."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.analysis.kernels.stages import nodes_of
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.analysis.symbolic.from_tirx import from_tirx, to_tirx
from relax_disc.errors import GraphError


def of_one_sequence(kernel: tirx.PrimFunc, sequences: tirx.Var, times: int) -> tirx.PrimFunc:
    """Write one for ``times * sequences`` in the extents of a kernel; elsewhere nothing changes."""

    def extent(expr: Any, mutator: Any) -> Any:
        found = _divided(expr, sequences, times)
        return mutator.default_mutate(expr) if found is None else found

    return mutate(kernel, (tirx.Mul, extent))


def _divided(expr: Any, sequences: tirx.Var, times: int) -> Any | None:
    """Divide a product by the number of sequences; None: it has no such factor."""
    variables = {var.name: var for var in nodes_of(tirx.Var, expr)}
    own = variables.get(sequences.name)
    if own is None or not own.same_as(sequences):
        return None
    try:
        size = from_tirx(expr)
    except GraphError:
        return None
    quotient = SymbolicExpr()
    for monomial, factor in size.terms.items():
        if sequences.name not in monomial or factor % times:
            return None
        rest = list(monomial)
        rest.remove(sequences.name)
        term = SymbolicExpr.constant(factor // times)
        for name in rest:
            if name not in variables:
                return None
            term = term * SymbolicExpr.dim(name)
        quotient = quotient + term
    return to_tirx(quotient, variables)
