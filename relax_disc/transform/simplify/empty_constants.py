"""Constants without elements become kernels: TVM saves a program with one, and cannot load it.

`torch.tensor([])` that a loop grows by `torch.cat` is one, and what `FoldConstant` makes of the
columns that `torch.block_diag` puts before the first block.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator


@tvm.transform.module_pass(opt_level=0, name="EmptyConstants")
class EmptyConstants:
    """Replace constants without elements by calls of a kernel that writes none."""

    def transform_module(
        self, module: tvm.IRModule, context: tvm.transform.PassContext
    ) -> tvm.IRModule:
        """Rewrite every Relax function."""
        del context
        replacing = _Replacing(module)
        for name, function in module.functions_items():
            if isinstance(function, relax.Function):
                replacing.builder_.update_func(name, replacing.visit_expr(function))
        return replacing.builder_.finalize()


@mutator
class _Replacing(PyExprMutator):
    def visit_generic_const_(self, op: Any) -> relax.Expr:
        """Emit a kernel in the place of a constant without elements."""
        shape = getattr(op.value, "shape", ())
        if 0 not in shape:
            return op
        extents, dtype = [tvm.tirx.IntImm("int64", n) for n in shape], str(op.value.dtype)
        nothing = te.create_prim_func([topi.full(extents, dtype, 0)])
        nothing = nothing.without_attr("global_symbol").with_attr("tirx.is_scheduled", True)
        kernel = self.builder_.add_func(nothing, "nothing")
        made = relax.call_tir(kernel, [], relax.TensorType(extents, dtype))
        return self.builder_.emit(made)
