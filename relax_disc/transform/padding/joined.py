"""Kernels of several sequences, for a batch of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.analysis.kernels.stages import is_buffer, nodes_of
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.analysis.symbolic.from_tirx import from_tirx, to_tirx
from relax_disc.errors import GraphError
from relax_disc.transform.simplify.canonicalize_extents import with_simple_extents


def of_one_sequence(kernel: tirx.PrimFunc, sequences: tirx.Var, times: int) -> tirx.PrimFunc:
    """Write one for ``times * sequences`` in the extents of a kernel; elsewhere nothing changes."""

    def extent(expr: Any, mutator: Any) -> Any:
        found = _divided(expr, sequences, times)
        return mutator.default_mutate(expr) if found is None else found

    return mutate(kernel, (tirx.Mul, extent))


def of_packed_rows(
    kernel: tirx.PrimFunc, pairs: Sequence[tuple[Any, Any]], tokens: Sequence[Any]
) -> tuple[tirx.PrimFunc, list[tuple[Any, Any]]]:
    """Let a kernel of ``length * batch`` rows, given as numbers, read them from its buffers.

    Of packed rows there is one sequence, as long as there are rows.

    ``pairs``: arguments and operands. ``tokens``: the numbers of rows.
    """
    given: dict[Any, Any] = {}
    for (_, operand), parameter in zip(pairs, kernel.params, strict=False):
        if isinstance(operand, tirx.IntImm) and int(operand) == 1:
            given[parameter] = operand
        elif any(operand.same_as(each) for each in tokens):
            given[parameter] = tirx.Var(operand.name, "int64")
    rows = [size for size in given.values() if isinstance(size, tirx.Var)]
    if not rows:
        return kernel, list(pairs)
    made = with_simple_extents(kernel.specialize(given))
    extents = [n for parameter in made.params if is_buffer(parameter) for n in parameter.shape]
    if not all(any(n.same_as(size) for n in extents) for size in rows):
        return kernel, list(pairs)
    kept = zip(pairs, kernel.params, strict=False)
    return made, [pair for pair, parameter in kept if parameter not in given]


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
