"""The gradient of an embedding table: rows of a gradient added up by their index."""

from __future__ import annotations

from tvm import relax, tirx

from relax_disc.ops import registry


def embedding_backward(
    grad: relax.Expr, ids: relax.Expr, *, num_embeddings: int, padding_idx: int = -1
) -> relax.Call:
    """Build ``relax_disc.embedding_backward``.

    ``result[r] = sum of grad[i] over all i with ids[i] == r``, in the order of ``i``, so that the
    result does not depend on the number of threads.

    Parameters
    ----------
    grad : relax.Expr
        ``[..., D]``.
    ids : relax.Expr
        ``[...]``, integers in ``[0, num_embeddings)``.
    num_embeddings : int
        Number of rows of the table.
    padding_idx : int
        A row that gets no gradient; -1 when there is none.

    Returns
    -------
    relax.Call
        A tensor ``[num_embeddings, D]`` of the gradient's type.
    """
    attrs = {"num_embeddings": int(num_embeddings), "padding_idx": int(padding_idx)}
    return registry.call("relax_disc.embedding_backward", [grad, ids], attrs)


def _infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    grad = registry.tensor_type(call.args[0], "relax_disc.embedding_backward: grad")
    registry.tensor_type(
        call.args[1], "relax_disc.embedding_backward: ids", len(registry.extents(grad)) - 1
    )
    rows = tirx.IntImm("int64", int(registry.attribute(call, "num_embeddings")))
    return relax.TensorType([rows, registry.extents(grad)[-1]], registry.dtype_name(grad))


registry.register(
    "relax_disc.embedding_backward", _infer, "Gradient of an embedding table by its lookups."
)
