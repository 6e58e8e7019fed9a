"""Turn the marks of `InsertRematerialization` into a list of kernels that a plan may run again.

The calls of `relax_disc.evict` and `relax_disc.regenerate` go; the function attribute
``relax_disc.recomputable`` lists, in program order, the kernels that compute a marked tensor and
all that those depend on, as far as running them twice gives the same.  `PlanArena` calls
`relax_disc.regenerate_before` in front of the kernels that read what such kernels make, and the
plan of each shape says what is run there.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from relax_disc.analysis.program.reader import bindings_of, read_function
from relax_disc.analysis.program.table import NotPlannableError
from relax_disc.transform.functions import copy_module, program_functions

MARKS = ("relax_disc.evict", "relax_disc.regenerate")


@tvm.transform.module_pass(opt_level=0, name="LowerRematerialization")
class LowerRematerialization:
    """Replace marks by the attribute ``relax_disc.recomputable``."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module without marks."""
        del ctx
        result = copy_module(mod)
        for variable, function in program_functions(mod):
            if not any(_is_mark(binding.value) for binding in _bindings(function)):
                continue
            lowered = _without_marks(function)
            try:
                kernels = recomputable_kernels(mod, variable.name_hint)
            except NotPlannableError:
                kernels = []
            if kernels:
                lowered = lowered.with_attr("relax_disc.recomputable", kernels)
            result.update_func(variable, lowered)
        return relax.transform.Normalize()(result)


def recomputable_kernels(mod: tvm.IRModule, name: str) -> list[int]:
    """Kernels, in program order, that make the marked tensors of a function from what stays."""
    table = read_function(mod, name)
    makers = {b: k for k, kernel in enumerate(table.kernels) for b in kernel.outputs}
    found: set[int] = set()
    waiting = [makers[buffer] for buffer in sorted(table.candidates) if buffer in makers]
    while waiting:
        k = waiting.pop()
        if k not in found and table.kernels[k].recomputable:
            found.add(k)
            waiting += [makers[b] for b in table.kernels[k].inputs if b in makers]
    return sorted(found)


def _bindings(function: relax.Function) -> list[relax.Binding]:
    return bindings_of(function) if isinstance(function.body, relax.SeqExpr) else []


def _is_mark(value: relax.Expr) -> bool:
    return (
        isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name in MARKS
    )


def _without_marks(function: relax.Function) -> relax.Function:
    return _MarkRemover(function).run()


@relax.expr_functor.mutator
class _MarkRemover(relax.PyExprMutator):
    """Put the argument of a mark in the place of the mark's variable."""

    def __init__(self, function: relax.Function) -> None:
        super().__init__()
        self._function = function

    def run(self) -> Any:
        return self.visit_expr(self._function)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if _is_mark(binding.value):
            kept: Any = self.visit_expr(binding.value.args[0])
            self.set_var_remap(binding.var, kept)
        else:
            super().visit_var_binding_(binding)
