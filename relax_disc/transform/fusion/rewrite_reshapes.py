"""Give a value another shape where a kernel would only copy it into that shape.

TVM's `RewriteDataflowReshape` raises on a kernel over an extent such as ``n // 2 * 2 + n``, by
which it cannot divide; such a kernel stays what it is.
"""

from __future__ import annotations

import tvm
from tvm import relax

from relax_disc.transform.functions import (
    at_span,
    block_like,
    copy_module,
    is_reshape,
    program_functions,
    with_blocks,
)
from relax_disc.transform.fusion.producers import kernel_of


@tvm.transform.module_pass(opt_level=0, name="RewriteReshapes")
class RewriteReshapes:
    """Put `relax.reshape` in the place of kernels that are one, inside dataflow blocks."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with reshapes; kernels that nothing calls any more are still there."""
        del ctx
        result = copy_module(mod)
        for variable, function in program_functions(mod):
            blocks = [
                block_like(block, [_rewritten(mod, binding) for binding in block.bindings])
                if isinstance(block, relax.DataflowBlock)
                else block
                for block in function.body.blocks
            ]
            result.update_func(variable, with_blocks(function, blocks))
        return relax.transform.Normalize()(result)


def _rewritten(mod: tvm.IRModule, binding: relax.Binding) -> relax.Binding:
    kernel = kernel_of(mod, binding.value)
    if kernel is None or not is_reshape(kernel):
        return binding
    source, shape = binding.value.args[1].fields[0], binding.value.ty_args[0].shape
    reshape = at_span(relax.op.reshape(source, shape), binding.value.span)
    return relax.VarBinding(binding.var, reshape, binding.span)
