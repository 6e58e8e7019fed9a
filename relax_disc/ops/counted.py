"""Operators that count: their first result has as many rows as the data say.

That extent is a dim of the function which a call enters with its bound; the run time gives it the
size that the library's function returns, and every kernel that mentions it comes later
(`relax_disc.analysis.program.counted`).  On the CPU see `vm_builtins/src/kernels/counted.cc`; on
CUDA PyTorch's kernels count, and the host waits for the number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax

from relax_disc.ops import registry

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site

NONZERO, UNIQUE = "relax_disc.nonzero", "relax_disc.unique"

COUNTING = frozenset({NONZERO, UNIQUE})
"""Names of the operators."""

COUNTING_KERNELS = frozenset(
    f"relax_disc.{device}.{name.removeprefix('relax_disc.')}"
    for device in ("cpu", "cuda")
    for name in COUNTING
)
"""Names of the functions of libraries that they become."""


def nonzero(mask: relax.Expr, count: Any) -> relax.Call:
    """Build the call that lists the true elements of a mask.

    ``mask``: ``[n]``, bool. ``count``: the dim of the result. Returned: ``[count]`` int64: the
    positions, in order.
    """
    return registry.call(NONZERO, [mask, relax.ShapeExpr([count])], {})


def unique(x: relax.Expr, count: Any) -> relax.Call:
    """Build the call that lists the distinct values of a tensor.

    ``x``: ``[n]``: float32, float64, int32 or int64. ``count``: the dim of the result. Returned:
    values ``[count]`` in order, NaN last and each by itself; int64: ``[n]``, where each element's
    value is among them; ``[count]``, how often each is there; ``[n]``, scratch.
    """
    return registry.call(UNIQUE, [x, relax.ShapeExpr([count])], {})


def _infer_nonzero(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    del builder
    registry.tensor_type(call.args[0], f"{NONZERO}: mask", 1)
    return relax.TensorType(list(call.args[1].values), "int64")


def _infer_unique(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    del builder
    kind = registry.tensor_type(call.args[0], f"{UNIQUE}: x", 1)
    flat, found = registry.extents(kind), list(call.args[1].values)
    kinds = [relax.TensorType(found, registry.dtype_name(kind))]
    kinds += [relax.TensorType(shape, "int64") for shape in (flat, found, flat)]
    return relax.TupleType(kinds)


registry.register(NONZERO, _infer_nonzero, "Positions of the true elements of a mask.")
registry.register(UNIQUE, _infer_unique, "Distinct values of a tensor.")


@registry.dispatches(NONZERO, UNIQUE)
def dispatch(call: relax.Call, site: Site) -> relax.Expr:
    """Call the library: there is no other form."""
    result = site.original.ty
    fields = list(result.fields) if isinstance(result, relax.TupleType) else result
    return site.call(call.op.name.removeprefix("relax_disc."), [call.args[0]], fields)


def _nonzero_device_bytes(views: list[Any], numbers: list[Any], units: int) -> Any:
    """Bound what ``nonzero`` takes on CUDA: the positions once more, and what CUB keeps of tiles.

    ``aten/src/ATen/native/cuda/Nonzero.cu`` of PyTorch 2.13: a reduction, then a selection, each
    with 16 bytes for a tile of 512 elements at least.
    """
    del numbers, units
    mask, positions = views
    return registry.size_bytes(positions) + registry.size_bytes(mask) + registry.SMALL_BYTES


def _unique_device_bytes(views: list[Any], numbers: list[Any], units: int) -> Any:
    """Bound what ``_unique2`` takes on CUDA.

    ``aten/src/ATen/native/cuda/UniqueCub.cu`` of PyTorch 2.13: values sorted, those that differ,
    and once more in CUB's radix sort; int64 of places and of sorted places, twice in the sort, of
    where values begin, of each one's place among them, and counts.
    """
    del numbers, units
    x = views[0]
    wide = 8 * registry.elements(x.shape)
    return 3 * registry.size_bytes(x) + 7 * wide + registry.SORT_BYTES


registry.LIBRARY["nonzero"] = registry.LibraryFunction(device_bytes=_nonzero_device_bytes)
registry.LIBRARY["unique"] = registry.LibraryFunction(device_bytes=_unique_device_bytes)
