"""The gradient of an embedding table: rows of a gradient added up by their index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax, te, tirx

from relax_disc.ops import registry
from relax_disc.ops.operand_views import is_call_of, same_shape
from relax_disc.ops.registry import Kind

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


def _results(grad: Kind, ids: Kind, **attrs: Any) -> list[tuple[Any, str]]:
    if len(ids.shape) != len(grad.shape) - 1:
        raise TypeError(f"relax_disc.embedding_backward: {grad} is no gradient at ids {ids}.")
    return [((int(attrs["num_embeddings"]), grad.shape[-1]), grad.dtype)]


embedding_backward = registry.operator(
    "embedding_backward(Tensor grad, Tensor ids, SymInt num_embeddings, SymInt padding_idx=-1)",
    """Gradient of an embedding table by its lookups.

    ``result[r] = sum of grad[i] over all i with ids[i] == r``, in the order of ``i``, so that the
    result, ``[num_embeddings, D]`` of the gradient's type, does not depend on the number of
    threads.

    ``grad`` is ``[..., D]``, ``ids`` ``[...]``, integers in ``[0, num_embeddings)``.
    ``padding_idx``: a row that gets no gradient; -1 when there is none.
    """,
    _results,
    is_traced=False,
)


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    grad, ids = call.args
    rows, padding = int(call.attrs["num_embeddings"]), int(call.attrs["padding_idx"])
    wide = registry.statistics_dtype(grad.ty)
    dtype = registry.dtype_name(grad.ty)

    def table(grad: te.Tensor, ids: te.Tensor) -> te.Tensor:
        axes = [te.reduce_axis((0, extent)) for extent in ids.shape]

        def element(row: Any, column: Any) -> Any:
            index = ids[tuple(axes)]
            found = tirx.all(index == row.astype(index.dtype), index != padding)
            value = grad[(*axes, column)].astype(wide)
            return te.sum(tirx.if_then_else(found, value, tirx.const(0, wide)), axis=axes)

        sums = te.compute((rows, grad.shape[-1]), element, name="embedding_backward")
        if dtype == wide:
            return sums
        return te.compute(sums.shape, lambda *i: sums(*i).astype(dtype), name="narrow")

    return builder.call_te(table, grad, ids)


registry.register_legalization("relax_disc.embedding_backward", _legalize)
# The gradient of a tied table is added up where the other gradient lies.
BACKWARD = "relax_disc.cpu.embedding_backward"
BACKWARD_ADD, BACKWARD_ROWS, BACKWARD_ADD_ROWS = (
    f"{BACKWARD}_{end}" for end in ("add", "rows", "add_rows")
)


def _device_bytes(views: list[Any], numbers: list[Any], units: int) -> Any:
    """Bound what ``embedding_dense_backward`` takes on CUDA (PyTorch 2.13).

    ``aten/src/ATen/native/cuda/Embedding.cu``: the result, ids sorted with their places.
    ``EmbeddingBackwardKernel.cu``: four arrays of segments, sums of a row for each id at most, in
    float32 at least; the sort of CUB has its keys and values twice.
    """
    del numbers, units
    grad, ids, table = views[0], views[1], views[-1]
    sums = registry.elements(grad.shape) * max(4, registry.itemsize(grad.dtype))
    segments = 96 * registry.elements(ids.shape)
    return registry.size_bytes(table) + sums + segments + registry.SORT_BYTES


registry.LIBRARY["embedding_backward"] = registry.LibraryFunction(device_bytes=_device_bytes)
for _end, _result in (("add", 4), ("add_rows", 6)):
    registry.LIBRARY[f"embedding_backward_{_end}"] = registry.LibraryFunction(
        overwrites=frozenset({(2, _result)}), device_bytes=_device_bytes
    )


@registry.dispatches("relax_disc.embedding_backward")
def dispatch(call: relax.Call, site: Site) -> relax.Expr:
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


@registry.dispatches("relax.add")
def dispatch_add(call: relax.Call, site: Site) -> relax.Expr | None:
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
