"""Reshapes: their kernels say that they are one, which TVM cannot always read from the indices.

It cannot divide an index by the product of two dims, as of rows and columns that become one axis.
"""

from __future__ import annotations

from tvm import relax, topi

from relax_disc.ops import registry

IS_RESHAPE = "relax_disc.is_reshape"
"""Attribute of a kernel that copies its operand into another shape and does no more."""


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    x, shape = call.args
    if isinstance(shape, relax.Var):
        shape = builder.lookup_binding(shape)
    return builder.call_te(
        topi.reshape, x, shape, primfunc_name_hint="reshape", primfunc_attrs={IS_RESHAPE: True}
    )


registry.register_legalization("relax.reshape", _legalize)
