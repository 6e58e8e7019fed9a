"""Which integer inputs of a function index a table, and what values they may have.

An id outside its table reads or writes foreign memory inside a kernel, so a caller wants to refuse
it first.  Followed are the uses of an input by the frontend's ``embedding`` kernels, by
`relax.take` and by cross-entropy, directly or through casts and reshapes; any other use allows any
value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tvm import ir, relax, tirx

_EMBEDDING = re.compile(r"embedding\d*")
_TRANSPARENT = frozenset(
    {"relax.astype", "relax.reshape", "relax.flatten", "relax.expand_dims", "relax.squeeze"}
)


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Allowed values ``lower .. upper``, inclusive, and one more value that is ignored."""

    lower: int
    upper: int
    ignored: int | None = None


def index_ranges(func: relax.Function) -> dict[str, IndexRange]:
    """Return the range of each parameter that indexes a table of known size.

    Parameters
    ----------
    func : relax.Function
        Operators as the frontend wrote them, before legalization.

    Returns
    -------
    dict of str to IndexRange
        By the parameter's name; where several tables are indexed, the least range.
    """
    origin: dict[relax.Var, str] = {var: var.name for var in func.params}
    found: dict[str, IndexRange] = {}
    for block in func.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if not isinstance(value, relax.Call) or not isinstance(value.op, ir.Op):
                if isinstance(value, relax.Var) and value in origin:
                    origin[binding.var] = origin[value]
                continue
            name = value.op.name
            if name in _TRANSPARENT and value.args[0] in origin:
                origin[binding.var] = origin[value.args[0]]
                continue
            use = _table_use(name, value)
            if use is not None and use[0] in origin:
                source = origin[use[0]]
                found[source] = _narrow(found.get(source), use[1])
    return found


def _table_use(name: str, call: relax.Call) -> tuple[relax.Expr, IndexRange] | None:
    if name == "relax.take":
        axis = call.attrs.axis
        size = _extent(call.args[0], 0 if axis is None else int(axis))
        return None if size is None else (call.args[1], IndexRange(0, size - 1))
    if name == "relax.call_tir" and _EMBEDDING.fullmatch(call.args[0].name_hint):
        table, ids = call.args[1].fields[:2]
        size = _extent(table, 0)
        return None if size is None else (ids, IndexRange(0, size - 1))
    if name == "relax_disc.cross_entropy":
        size = _extent(call.args[0], 1)
        if size is None:
            return None
        return call.args[1], IndexRange(0, size - 1, int(call.attrs["ignore_index"]))
    return None


def _extent(table: relax.Expr, axis: int) -> int | None:
    shape = table.ty.shape
    if not isinstance(shape, relax.ShapeExpr):
        return None
    extent = shape.values[axis]
    return int(extent) if isinstance(extent, (int, tirx.IntImm)) else None


def _narrow(known: IndexRange | None, new: IndexRange) -> IndexRange:
    if known is None:
        return new
    ignored = new.ignored if known.ignored is None else known.ignored
    if known.ignored is not None and new.ignored != known.ignored:
        ignored = None
    return IndexRange(max(known.lower, new.lower), min(known.upper, new.upper), ignored)
