"""The gradient of an embedding table as a library call, onto another gradient if it is tied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import relax

from relax_disc.ops import registry
from relax_disc.transform.simplify.operand_views import is_call_of, same_shape

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


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


def add(call: relax.Call, site: Site) -> relax.Expr | None:
    """Fold an addition into the table's gradient that nothing else uses."""
    name = f"{site.family}.embedding_backward"
    for index in (1, 0):
        if not _is_only_here(site.original.args[index], site):
            continue
        gradient, addend = call.args[index], call.args[1 - index]
        value = site.definition(gradient)
        if not is_call_of(value, "relax.call_dps_packed") or value.args[0].global_symbol != name:
            continue  # a cast lies between
        kinds = [registry.dtype_name(operand.ty) for operand in (gradient, addend)]
        if kinds[0] != kinds[1] or not same_shape(gradient, addend, site.analyzer):
            continue
        grad, ids, padding = value.args[1].fields
        result = relax.TensorType(gradient.ty.shape, kinds[0])
        return site.call("embedding_backward_add", [grad, ids, addend, padding], result)
    return None


def _is_only_here(expr: relax.Expr, site: Site) -> bool:
    """Whether an expression is a table's gradient with one use."""
    if not isinstance(expr, relax.Var) or len(site.uses.users_of(expr)) != 1:
        return False
    return is_call_of(site.uses.definitions.get(expr, expr), "relax_disc.embedding_backward")
