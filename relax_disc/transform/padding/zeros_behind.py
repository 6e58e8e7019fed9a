"""Conditions of a choice turned around, so that its zeros are read as such."""

from __future__ import annotations

import tvm
from tvm import relax

from relax_disc.analysis.padding.grid import constant_of
from relax_disc.analysis.program.reader import bindings_of
from relax_disc.ops import registry
from relax_disc.transform.functions import with_blocks

_WHERE = tvm.ir.Op.get("relax.where")


def zeros_behind(function: relax.Function) -> relax.Function:
    """Choose zero where a condition does not hold, instead of where it holds.

    ``loss.masked_fill(labels == -100, 0)`` is zero wherever the condition that is computed then is
    false, as it is in rows that fill up.
    """
    (block,), bindings = function.body.blocks, []
    known = {binding.var: binding.value for binding in bindings_of(function)}
    for binding in bindings_of(function):
        value = binding.value
        if isinstance(value, relax.Call) and value.op == _WHERE:
            condition, held, other = value.args
            is_float = registry.dtype_name(value.ty).startswith(("float", "bfloat"))
            if is_float and constant_of(known.get(held, held)) == 0.0:
                # By bits: TVM takes not (a < b) for a >= b, whatever a NaN is.
                for call in (
                    lambda x: relax.op.astype(x, "int8"),
                    lambda x: relax.op.bitwise_xor(x, relax.const(1, "int8")),
                    lambda x: relax.op.astype(x, "bool"),
                ):
                    bits = relax.BlockBuilder().normalize(call(condition))
                    condition = relax.DataflowVar("fails", bits.ty)
                    bindings.append(relax.VarBinding(condition, bits, binding.span))
                args = [condition, other, held]
                value = relax.Call(_WHERE, args, value.attrs, span=value.span)
                value = relax.BlockBuilder().normalize(value)
                binding = relax.VarBinding(binding.var, value, binding.span)
        bindings.append(binding)
    return with_blocks(function, [type(block)(bindings, block.span)])
