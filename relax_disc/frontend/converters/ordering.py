"""Sorting, selection by rank."""

from __future__ import annotations

from typing import Any

from tvm import relax

from relax_disc import ops
from relax_disc.frontend.converters.registry import WIDE, axis_of, converts
from relax_disc.frontend.emitter import Emitter

op: Any = relax.op

_SORTABLE = ("float32", "float64", "int32", "int64")


def _sorted(
    emitter: Emitter, x: Any, axis: int, descending: bool, count: int | None
) -> tuple[Any, Any]:
    """Sort along an axis; types that the library does not have pass through wider ones."""
    if not emitter.shape(x):
        return x, emitter.emit(emitter.const(0, "int64"))
    dtype = emitter.dtype(x)
    wide = dtype if dtype in _SORTABLE else WIDE.get(dtype, "int32")
    axis, last = axis_of(emitter, x, axis), len(emitter.shape(x)) - 1
    order = list(range(last + 1))
    order[axis], order[last] = order[last], order[axis]
    x = emitter.cast(x, wide)
    x = x if axis == last else emitter.emit(op.permute_dims(x, order))
    found = emitter.fields(ops.sort(x, descending=descending, count=count))
    if axis != last:
        found = tuple(emitter.emit(op.permute_dims(part, order)) for part in found)
    return emitter.cast(found[0], dtype), found[1]


@converts("aten.sort.default", "aten.sort.stable")
def sort(
    emitter: Emitter, x: Any, axis: int = -1, descending: bool = False, stable: Any = None
) -> Any:
    """Sorted elements and where they were; equal elements always keep their order."""
    return _sorted(emitter, x, axis, descending, None)


@converts("aten.topk.default")
def topk(
    emitter: Emitter,
    x: Any,
    count: Any,
    axis: int = -1,
    largest: bool = True,
    is_sorted: Any = True,
) -> Any:
    """The greatest or least elements in order; of equals, the first."""
    if not isinstance(count, int):
        raise emitter.refuse("the number of elements must not depend on a dim")
    return _sorted(emitter, x, axis, largest, count)
