"""The first elements of each row in sorted order, with their positions: sort, top-k, argsort."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import relax, tirx

from relax_disc.ops import registry

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


def sort(x: relax.Expr, *, descending: bool, count: int | None = None) -> relax.Call:
    """Build ``relax_disc.sort``.

    Equal elements keep their order; NaN counts as the greatest, as in PyTorch.

    Parameters
    ----------
    x : relax.Expr
        ``[..., N]``, float32, float64, int32 or int64.
    descending : bool
        Whether the greatest comes first.
    count : int, optional
        How many elements of each sorted row to return; all of them if not given.

    Returns
    -------
    relax.Call
        Of type ``Tuple(values [..., count], positions [..., count] int64)``.
    """
    attrs = {"descending": bool(descending), "count": -1 if count is None else int(count)}
    return registry.call("relax_disc.sort", [x], attrs)


def _infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    x = registry.tensor_type(call.args[0], "relax_disc.sort: x")
    shape, count = registry.extents(x), int(registry.attribute(call, "count"))
    if not shape:
        raise TypeError("relax_disc.sort: x must have a last axis.")
    if count >= 0:
        shape = [*shape[:-1], tirx.IntImm("int64", count)]
    return relax.TupleType(
        [relax.TensorType(shape, registry.dtype_name(x)), relax.TensorType(shape, "int64")]
    )


registry.register("relax_disc.sort", _infer, "First elements of each row in sorted order.")


@registry.dispatches("relax_disc.sort")
def dispatch(call: relax.Call, site: Site) -> relax.Expr:
    """Call the library: there is no other form; the results' shape says how many to return."""
    descending = int(registry.attribute(call, "descending"))
    return site.call("sort", [*call.args, descending], list(site.original.ty.fields))


# Scratch for the row that each thread sorts.
registry.LIBRARY["sort"] = registry.LibraryFunction(
    workspace=lambda views, _: ("sort", (views[0].shape[-1],))
)
