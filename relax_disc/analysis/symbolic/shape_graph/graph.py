"""The symbolic shape graph: what is known of all sizes in a module, before anything runs.

Sizes that look different are often equal: a reshape keeps the number of elements, the operands of
an addition have one shape, a call gives its arguments' shapes to the callee.  The graph collects
such facts and writes every size in the fewest dims, so that sizes compare as polynomials.

Reference: the symbolic shape graph of BladeDISC++ (Z. Zheng and others, 2024), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from relax_disc.analysis.symbolic.comparison.compare import Comparison, compare
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr, as_expr
from relax_disc.analysis.symbolic.from_tirx import from_tirx
from relax_disc.analysis.symbolic.shape_graph.facts import Fact, is_size, tensors_of
from relax_disc.analysis.symbolic.shape_graph.reader import ModuleReader
from relax_disc.analysis.symbolic.shape_graph.solver import Rule, ShapeConstraints
from relax_disc.errors import GraphError


@dataclass(frozen=True, slots=True, eq=False)
class SymbolicShapeGraph:
    """Sizes of a module in a canonical set of free dims.

    Attributes
    ----------
    dims : tuple of SymbolicDim
        Free dims, with the ranges and divisors that follow from all declarations.
    equalities : mapping of str to SymbolicExpr
        Every other dim in terms of the free ones.
    rules : tuple of Rule
        Equalities that no single dim could be solved for.
    """

    dims: tuple[SymbolicDim, ...]
    equalities: Mapping[str, SymbolicExpr]
    rules: tuple[Rule, ...]
    _constraints: ShapeConstraints = field(repr=False)
    _variables: Mapping[tuple[str, Any], SymbolicExpr] = field(repr=False)
    _facts: Mapping[Any, Fact] = field(repr=False)

    @classmethod
    def from_module(cls, mod: tvm.IRModule) -> SymbolicShapeGraph:
        """Collect and solve the size equalities of all functions of a module.

        Parameters
        ----------
        mod : tvm.IRModule
            Relax functions, with operators or in call_tir form, and kernels.

        Raises
        ------
        GraphError
            Sizes contradict each other, or a shape is unknown; the message names the binding.
        """
        reader = ModuleReader(mod)
        reader.read()
        constraints = reader.constraints
        used = {dim.name for value in reader.dims.values() for dim in value.free_dims}
        return cls(
            tuple(dim for dim in constraints.free if dim.name in _reached(constraints, used)),
            {name: constraints.solved[name] for name in constraints.solved if name in used},
            tuple(constraints.rules),
            constraints,
            dict(reader.dims),
            dict(reader.facts),
        )

    def canonical(self, size: Any, function: str | None = None) -> SymbolicExpr:
        """Return a size in the free dims.

        Parameters
        ----------
        size : SymbolicExpr, SymbolicDim, int, str or tvm.tirx expression
            A string is parsed.  A TVM expression may hold variables of the module's functions.
        function : str, optional
            Where the variables of a TVM expression belong, for variables that functions share.

        Raises
        ------
        GraphError
            A variable does not occur in the module.
        """
        if isinstance(size, str):
            size = SymbolicExpr.parse(size, self._constraints.dims)
        if isinstance(size, SymbolicExpr | SymbolicDim | int):
            return self._constraints.canonical(as_expr(size))
        return self._constraints.canonical(from_tirx(size, _Variables(self._variables, function)))

    def shape(self, var: relax.Var | str) -> tuple[SymbolicExpr, ...]:
        """Return the canonical shape of a tensor variable (or of the variable of that name)."""
        tensors = tensors_of(self._fact(var))
        if len(tensors) != 1:
            raise GraphError(f"{var} holds {len(tensors)} tensors, not one.")
        return tuple(self.canonical(size) for size in tensors[0].shape or ())

    def bytes(self, var: relax.Var | str) -> SymbolicExpr:
        """Return the bytes of a variable, of a tuple all together."""
        total = SymbolicExpr.constant(0)
        for tensor in tensors_of(self._fact(var)):
            total = total + tensor.bytes
        return self.canonical(total)

    def compare(self, a: Any, b: Any) -> Comparison:
        """Compare two sizes over all shapes that the module allows.

        Parameters
        ----------
        a, b : relax.Var, or what `canonical` takes
            The variable of a tensor stands for its bytes.
        """
        left, right = (
            self.bytes(size)
            if isinstance(size, relax.Var) and not is_size(size)
            else self.canonical(size)
            for size in (a, b)
        )
        return compare(left, right, self._constraints.dims)

    def __str__(self) -> str:
        lines = ["dims", *(f"  {dim}" for dim in self.dims)]
        if self.equalities:
            lines.append("equalities")
            origins = self._constraints.origins
            texts = {name: f"{name} == {value}" for name, value in self.equalities.items()}
            width = min(40, max(map(len, texts.values())))
            lines += [f"  {text:{width}}  from {origins[name]}" for name, text in texts.items()]
        if self.rules:
            lines.append("products")
            lines += [f"  {rule}  from {rule.origin}" for rule in self.rules]
        return "\n".join(lines)

    def _fact(self, var: relax.Var | str) -> Fact:
        if isinstance(var, str):
            named = [known for known in self._facts if known.name == var]
            if len(named) != 1:
                raise GraphError(
                    f"{len(named)} variables are named {var}; "
                    f"{'pass the variable itself' if named else 'the module has no such variable'}."
                )
            var = named[0]
        if var not in self._facts:
            raise GraphError(f"Variable {var} does not occur in the module of this shape graph.")
        return self._facts[var]


class _Variables(dict[Any, SymbolicExpr]):
    """Looks a tirx variable up in one function, or in the only one that has it."""

    def __init__(self, known: Mapping[tuple[str, Any], SymbolicExpr], function: str | None) -> None:
        super().__init__()
        self.known, self.function = known, function

    def __contains__(self, key: object) -> bool:
        return not isinstance(key, str)

    def __getitem__(self, key: Any) -> SymbolicExpr:
        values = {
            value
            for (function, variable), value in self.known.items()
            if variable.same_as(key) and self.function in (None, function)
        }
        if len(values) != 1:
            raise GraphError(
                f"Variable {key} stands for {len(values)} dims of the module; "
                f"{'name the function' if values else 'it does not occur there'}."
            )
        return values.pop()


def _reached(constraints: ShapeConstraints, used: set[str]) -> set[str]:
    """Return the names that the given dims stand for."""
    reached = set(used)
    for name in used:
        if name in constraints.solved:
            reached |= {dim.name for dim in constraints.solved[name].free_dims}
    return reached
