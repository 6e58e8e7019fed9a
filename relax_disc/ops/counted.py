"""Kernels that count: their first result has as many rows as the data say, which they return.

That extent is a dim of the function which a call enters with its bound; the run time gives it the
size that the kernel returns, and every kernel that mentions it comes later
(`relax_disc.analysis.program.counted`).  See `vm_builtins/src/kernels/counted.cc`.
"""

from __future__ import annotations

from typing import Any

from tvm import relax

NONZERO, UNIQUE = "relax_disc.cpu.nonzero", "relax_disc.cpu.unique"

COUNTING = frozenset({NONZERO, UNIQUE})
"""Names of the kernels."""


def nonzero(mask: relax.Expr, count: Any) -> relax.Call:
    """Build the call that lists the true elements of a mask.

    ``mask``: ``[n]``, bool. ``count``: the dim of the result. Returned: ``[count]`` int64: the
    positions, in order.
    """
    return relax.call_dps_packed(NONZERO, [mask], relax.TensorType([count], "int64"))


def unique(x: relax.Expr, count: Any) -> relax.Call:
    """Build the call that lists the distinct values of a tensor.

    ``x``: ``[n]``: float32, float64, int32 or int64. ``count``: the dim of the result. Returned:
    values ``[count]`` in order, NaN last and each by itself; int64: ``[n]``, where each element's
    value is among them; ``[count]``, how often each is there; ``[n]``, scratch.
    """
    kind: Any = x.ty
    flat, found = list(kind.shape.values), [count]
    kinds = [relax.TensorType(found, kind.dtype)]
    kinds += [relax.TensorType(shape, "int64") for shape in (flat, found, flat)]
    return relax.call_dps_packed(UNIQUE, [x], kinds)
