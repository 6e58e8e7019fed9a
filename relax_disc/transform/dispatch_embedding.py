"""The gradient of an embedding table as a library call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import relax

from relax_disc.ops import registry

if TYPE_CHECKING:
    from relax_disc.transform.dispatch_library import Site


def embedding_backward(call: relax.Call, site: Site) -> relax.Expr:
    """Dispatch `relax_disc.embedding_backward`; halves are summed in float32."""
    grad, ids = call.args
    kind = site.original.ty
    dtype = registry.dtype_name(kind)
    wide = "float64" if dtype == "float64" else "float32"
    if dtype != wide and site.family.endswith(".cpu"):
        grad = site.builder.emit(relax.op.astype(grad, wide))
    else:
        wide = dtype
    result = site.call(
        "embedding_backward",
        [grad, ids, int(call.attrs["padding_idx"])],
        relax.TensorType(kind.shape, wide),
    )
    if wide == dtype:
        return result
    return relax.op.astype(site.builder.emit(result), dtype)
