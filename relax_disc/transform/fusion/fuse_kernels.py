"""TVM's fusion of kernels, kernels with several results, and the lines of the user's model.

`FuseOps` moves operators into functions of their own and calls those; the call has no line, and
functions that are alike become one, so that the lines inside are those of its first use.  Here each
call is matched with the bindings that it replaced: it takes the line of the one that made its
result.  That line is what a memory report or an error names.  TVM joins a kernel with what reads
its result; `join_kernels` joins those that read the same values.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import tvm
from tvm import relax

from relax_disc.transform.functions import at_span, block_like, program_functions, with_blocks
from relax_disc.transform.fusion.fusion_groups import blocks_of, fuse_ops
from relax_disc.transform.fusion.multi_output_fusion import join_kernels


@tvm.transform.module_pass(opt_level=0, name="FuseKernels")
class FuseKernels:
    """`FuseOps` and `FuseTIR`; calls of fused kernels have the span of what they compute.

    Parameters
    ----------
    join : bool
        Whether kernels that read the same values become one (`relax_disc.transform.join_kernels`).
    """

    def __init__(self, join: bool = True) -> None:
        self.join = join

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with fused kernels."""
        del ctx
        grouped, groups = fuse_ops(mod)
        spans: dict[Any, Any] = {}
        for group in chain.from_iterable(groups.values()):
            located = [span for span in map(_span_of, group.bindings) if span is not None]
            if located:
                spans[group.result] = located[-1]
        if self.join:
            grouped = join_kernels(grouped)
        result = relax.transform.FuseTIR()(grouped)
        for variable, function in program_functions(result):
            for binding in chain.from_iterable(block.bindings for block in blocks_of(function)):
                if isinstance(binding.value, relax.TupleGetItem) and binding.var in spans:
                    spans[binding.value.tuple_value] = spans[binding.var]
            blocks = [
                block_like(block, [_located(binding, spans) for binding in block.bindings])
                for block in blocks_of(function)
            ]
            if blocks:
                result.update_func(variable, with_blocks(function, blocks))
        return relax.transform.Normalize()(result)


def _span_of(binding: relax.Binding) -> Any:
    return getattr(binding.value, "span", None) or binding.var.span


def _located(binding: relax.Binding, spans: dict[Any, Any]) -> relax.Binding:
    span, value = spans.get(binding.var), binding.value
    if span is None or not isinstance(value, relax.Call) or value.span is not None:
        return binding
    return relax.VarBinding(binding.var, at_span(value, span), span)
