"""Compute the numbers that a program makes of its sizes in one kernel; for CUDA.

The mean of a batch norm divides by a number of pixels: a launch of one thread, where launches
count.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.tirx.analysis import undefined_vars

from relax_disc.analysis.kernels.element import substitute
from relax_disc.analysis.kernels.stages import loads_of, read_stages
from relax_disc.transform.fusion.fusion_groups import with_rewritten_blocks
from relax_disc.transform.fusion.producers import kernel_of


@tvm.transform.module_pass(opt_level=0, name="JoinSizes")
class JoinSizes:
    """Let one kernel make all the numbers that a block computes from dims; before fusion."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the numbers as results of one call."""
        del ctx
        return with_rewritten_blocks(mod, _rewritten)


def _rewritten(
    builder: relax.BlockBuilder, mod: tvm.IRModule, function: relax.Function, block: Any
) -> list[relax.Binding] | None:
    """Write a block with one call for its numbers; None: there are not several."""
    del function
    if not isinstance(block, relax.DataflowBlock):
        return None
    bindings = list(block.bindings)
    made = {b.var: x for b in bindings if (x := _number(mod, b.value)) is not None}
    return _joined(builder, bindings, made) if len(made) > 1 else None


def _number(mod: tvm.IRModule, value: Any) -> Any:
    """Return what a kernel computes from dims alone, if it is one number; else None."""
    kernel = kernel_of(mod, value)
    if kernel is None or len(kernel.params) < 2 or len(value.args) != 2:
        return None
    *numbers, target = kernel.params
    if list(target.shape) or not all(isinstance(x.ty, tvm.ir.PrimType) for x in numbers):
        return None
    read = read_stages(kernel)
    if read is None or len(read.stages) != 1 or loads_of(read.stages[0].value):
        return None
    fields = list(value.args[1].fields)
    return substitute(read.stages[0].value, dict(zip(numbers, fields, strict=True)))


def _joined(
    builder: relax.BlockBuilder, bindings: list[relax.Binding], made: dict[relax.Var, Any]
) -> list[relax.Binding]:
    """Bind the numbers to the results of one call, which comes first."""
    dims: dict[tirx.Var, None] = {}
    for number in made.values():
        dims.update(dict.fromkeys(sorted(undefined_vars(number), key=lambda x: x.name)))

    def compute(*sizes: Any) -> list[te.Tensor]:
        inner = dict(zip(dims, sizes, strict=True))
        return [_scalar(substitute(number, inner)) for number in made.values()]

    call = builder.call_te(compute, *dims, primfunc_name_hint="sizes")
    together = relax.DataflowVar("sizes", call.ty)
    result: list[relax.Binding] = [relax.VarBinding(together, call)]
    for index, variable in enumerate(made):
        result.append(relax.VarBinding(variable, relax.TupleGetItem(together, index)))
    return [*result, *(binding for binding in bindings if binding.var not in made)]


def _scalar(value: Any) -> te.Tensor:
    return te.compute((), lambda: value, name="size")
