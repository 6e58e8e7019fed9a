"""Calls of library functions in place of operators that libraries do better than generated code.

Matrix products, attention and recurrent layers with their gradients, the gradient of an embedding
table. Each becomes a `call_dps_packed` of `relax_disc.cpu.*` or `relax_disc.cuda.*`, whose
arguments are described in `vm_builtins/libraries/install.py`. Permutations and reshapes of
operands are folded into strides.

A rule is `rule(call, site) -> Expr or None`; None means "not mine", and `LegalizeOps` does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.sym.analyzer import Analyzer

from relax_disc import ops  # noqa: F401  fills the table of rules
from relax_disc.analysis.padding.masked_rows import may_hide_rows
from relax_disc.analysis.program.told_from_zero import is_told_from_zero
from relax_disc.ops.operand_views import Uses, definition, is_call_of, permutation_of
from relax_disc.ops.registry import DISPATCH
from relax_disc.transform.functions import at_span, copy_module
from relax_disc.vm_builtins.libraries import install as libraries


@dataclass(frozen=True, slots=True)
class Site:
    """Where a call stands: what its operands are, who uses its result."""

    family: str  # prefix of the library's functions, such as ``"relax_disc.cpu"``
    # emits further bindings before the one at hand; knows the rewritten function
    builder: relax.BlockBuilder
    original: relax.Call  # the call before its arguments were rewritten
    variable: relax.Var  # what the call's result is bound to
    uses: Uses  # the function before the pass
    analyzer: Analyzer  # proves that shapes agree

    @property
    def is_cuda(self) -> bool:
        """Whether the library is PyTorch's for a GPU."""
        return self.family.endswith(".cuda")

    def definition(self, expr: relax.Expr) -> relax.Expr:
        """Follow variables of the rewritten function to what computes them."""
        return definition(expr, self.builder)

    def may_hide_rows(
        self, mask: relax.Expr, *, is_own_key_seen: bool, is_first_key_seen: bool
    ) -> bool:
        """Whether numbers of an attention's mask, as before the pass, may hide all of a row."""
        return may_hide_rows(
            mask,
            self.uses.definitions,
            self.builder.get(),
            is_own_key_seen=is_own_key_seen,
            is_first_key_seen=is_first_key_seen,
        )

    def is_told_from_zero(self) -> bool:
        """Whether what the function makes of the call's result tells little from nothing."""
        return is_told_from_zero(self.variable, self.uses.users_of, self.builder.get())

    def call(
        self, name: str, arguments: list[Any], result: tvm.ir.Type | list[tvm.ir.Type]
    ) -> relax.Call:
        """Make the call of a library function, at the source line of the operator."""
        values = [relax.prim_value(x) if isinstance(x, int) else x for x in arguments]
        call = relax.call_dps_packed(f"{self.family}.{name}", values, result)
        return at_span(call, self.original.span)


@tvm.transform.module_pass(opt_level=0, name="DispatchLibrary")
class DispatchLibrary:
    """Replace operators by library calls; see the module.

    Parameters
    ----------
    target : tvm.target.Target
        What to compile for: kinds "llvm" and "cuda" have libraries, others are left alone.
    """

    def __init__(self, target: tvm.target.Target) -> None:
        self._family = {"llvm": "relax_disc.cpu", "cuda": "relax_disc.cuda"}.get(target.kind.name)

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Dispatch in every Relax function."""
        del ctx
        if self._family is None:
            return mod
        libraries.install(self._family.removeprefix("relax_disc."))
        result = copy_module(mod)
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function) and not (function.attrs or {}).get("Primitive"):
                result[variable] = _Dispatcher(mod, function, self._family).run()
        result = relax.transform.CanonicalizeBindings()(result)
        return relax.transform.DeadCodeElimination()(result)


@relax.expr_functor.mutator
class _Dispatcher(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, function: relax.Function, family: str) -> None:
        super().__init__(mod)
        self._function = function
        self._family = family
        self._uses = Uses.of(function)
        self._variable: relax.Var | None = None
        self._analyzer = Analyzer()

    def run(self) -> relax.Function:
        return self.visit_expr(self._function)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self._variable = binding.var
        super().visit_var_binding_(binding)

    def visit_tuple_getitem_(self, element: relax.TupleGetItem) -> relax.Expr:
        new = self.visit_expr_post_order(element)
        whole = definition(new.tuple_value, self.builder_)
        return whole.fields[new.index] if isinstance(whole, relax.Tuple) else new

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        variable, self._variable = self._variable, None
        new = self.visit_expr_post_order(call)
        if is_call_of(new, "relax.permute_dims"):
            return self._cancel_permutations(new)
        rules = DISPATCH.get(new.op.name, ()) if isinstance(new.op, tvm.ir.Op) else ()
        if not rules or variable is None:
            return new
        site = Site(self._family, self.builder_, call, variable, self._uses, self._analyzer)
        return next((made for rule in rules if (made := rule(new, site)) is not None), new)

    def _cancel_permutations(self, call: relax.Call) -> relax.Expr:
        """Undo a permutation of a permutation that restores the order of axes."""
        inner = definition(call.args[0], self.builder_)
        if is_call_of(inner, "relax.permute_dims"):
            first = permutation_of(inner)
            if [first[axis] for axis in permutation_of(call)] == list(range(len(first))):
                return inner.args[0]
        return call
