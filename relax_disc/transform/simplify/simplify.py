"""Clean the operator graph before kernels are made: local rewrites that are never worse.

Chains of views become one view or none, powers become products, constants become scalars, equal
views become one.  Equal arithmetic is left alone on purpose: sharing a value between the forward
and the backward half would keep it in memory where computing it again, fused, costs nothing.

Bindings that stay keep their variables and source lines; new ones take those of the operator that
they replace.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.ops.operand_views import operands_of
from relax_disc.transform.functions import at_span, copy_module, with_blocks, without_unused
from relax_disc.transform.simplify.rules import RULES, SHARED

# Each rule may make room for another; chains longer than this do not occur.
_MOST_ROUNDS = 8


@tvm.transform.module_pass(opt_level=0, name="Simplify")
class Simplify:
    """Simplify all Relax functions of a module; see the module's description."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the simplified module, without the bindings that became unused."""
        functions = {}
        for var, func in mod.functions.items():
            if isinstance(func, relax.Function):
                func = _simplify_function(func)
            functions[var] = func
        return relax.transform.Normalize()(copy_module(mod, functions))


def _simplify_function(func: relax.Function) -> relax.Function:
    if not isinstance(func.body, relax.SeqExpr):
        return func
    graph = Graph()
    blocks = [graph.block(block) for block in func.body.blocks]
    return without_unused(with_blocks(func, blocks, graph.replaced(func.body.body)))


class Graph:
    """The bindings written so far, for rules to look through."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}
        self._replaced: dict[Any, Any] = {}
        self._has_replaced_sizes = False  # which are operands of no call, but part of types
        self._shared: dict[Any, Any] = {}
        self._bindings: list[Any] = []
        self._builder = relax.BlockBuilder()
        self._origin: Any = None

    def block(self, block: relax.BindingBlock) -> relax.BindingBlock:
        """Rewrite one block."""
        self._bindings = []
        # Values of one dataflow block are not visible in the next.
        self._shared = {}
        for binding in block.bindings:
            self._bind(binding)
        return type(block)(self._bindings, block.span)

    def definition(self, expr: Any) -> Any:
        """Return what a variable was bound to, or the expression itself."""
        return self._values.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def emit(self, expr: Any) -> Any:
        """Bind an intermediate result of a rule to a new variable."""
        expr = self._typed(expr)
        var = relax.DataflowVar(f"{self._origin.name}_part", expr.ty, self._origin.span)
        if not isinstance(self._origin, relax.DataflowVar):
            var = relax.Var(f"{self._origin.name}_part", expr.ty, self._origin.span)
        self._write(var, expr)
        return var

    def replaced(self, expr: Any) -> Any:
        """Replace variables that were simplified away."""
        if not self._replaced:
            return expr
        if isinstance(expr, relax.Var):
            return self._replaced.get(expr, expr)
        if not self._has_replaced_sizes and self._replaced.keys().isdisjoint(operands_of(expr)):
            return expr
        return mutate(expr, (relax.Var, lambda var, mutator: self._replaced.get(var, var)))

    def _replace(self, var: Any, value: Any) -> None:
        self._replaced[var] = value
        self._has_replaced_sizes |= isinstance(var.ty, tvm.ir.PrimType)

    def _bind(self, binding: Any) -> None:
        if not isinstance(binding, relax.VarBinding):
            value = self.replaced(binding.value)
            self._bindings.append(relax.MatchCast(binding.var, value, binding.ty, binding.span))
            return
        self._origin = binding.var
        value = self._rewrite(self.replaced(binding.value))
        if isinstance(value, relax.Var) and self._may_stand_for(value, binding.var):
            self._replace(binding.var, value)
            return
        key = _key(value)
        if key is not None:
            known = self._shared.setdefault(key, binding.var)
            if not known.same_as(binding.var) and self._may_stand_for(known, binding.var):
                self._replace(binding.var, known)
                return
        self._write(binding.var, value, binding.span)

    def _may_stand_for(self, value: Any, var: Any) -> bool:
        """Whether uses of ``var`` may become uses of ``value``."""
        if not tvm_ffi.structural_equal(value.ty, var.ty):
            return False
        return isinstance(var, relax.DataflowVar) or not isinstance(value, relax.DataflowVar)

    def _rewrite(self, value: Any) -> Any:
        for _ in range(_MOST_ROUNDS):
            if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
                break
            for rule in RULES.get(value.op.name, ()):
                simpler = rule(value, self)
                if simpler is not None:
                    break
            else:
                break
            value = simpler
        return value

    def _typed(self, expr: Any) -> Any:
        """Infer the type of a new call and give it the source line of the old one."""
        if isinstance(expr, relax.Call):
            expr = at_span(expr, self._origin.span)
        return self._builder.normalize(expr)

    def _write(self, var: Any, value: Any, span: Any = None) -> None:
        if type(value.ty) is tvm.ir.Type or (
            isinstance(value, relax.Call) and value.span is None and self._origin.span is not None
        ):
            value = self._typed(value)
        self._values[var] = value
        self._bindings.append(relax.VarBinding(var, value, span or self._origin.span))


def _key(value: Any) -> Any:
    """Return what equal views have in common; None for values that must not be shared."""
    if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
        return tvm_ffi.StructuralKey(value) if value.op.name in SHARED else None
    return None
