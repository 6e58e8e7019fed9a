"""Axes of tensors that are the sequences of a batch and the positions in them.

A *row* is one position of one sequence.  A tensor has rows as two axes, ``[batch, .., length,
..]``, or as one, ``[batch * length, ..]`` in this order.  Axes are known by their extents: those of
the dims are symbolic and differ, so an axis of just that extent counts them; two axes of one
extent are nobody's rows.  A batch may have sequences of several kinds, as those that a translator
reads and writes, each with a length of its own; axes of two lengths are nobody's rows, too.

Two batches that are joined to one have twice a dim of sequences, as DPO's pairs.

A *cut* is a part of the positions of each sequence: ``logits[:, :-1]`` has ``length - 1`` of them.
It counts as another length, of which it is known where it starts in the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tvm
from tvm import relax, tirx

from relax_disc.analysis.symbolic.from_tirx import elements, from_tirx
from relax_disc.errors import GraphError

Layout = Literal["none", "both", "merged", "batch", "length", "odd"]
"""Rows as two axes, as one; sequences or positions alone; the dims in any other way."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a tensor has its rows."""

    layout: Layout
    batch: int = -1  # axis of the sequences, or of the rows; -1: none
    length: int = -1  # axis of the positions, or of the rows; -1: none
    of: int = 0  # which of the lengths of the grid it is, cuts behind them

    @property
    def has_rows(self) -> bool:
        """Whether there is something for each row."""
        return self.layout in ("both", "merged")

    @property
    def axes(self) -> frozenset[int]:
        """The axes that count sequences, positions or rows."""
        return frozenset({self.batch, self.length} - {-1})


_Role = tuple[str, int | None]  # what an axis counts, and of which of the lengths
NO_ROWS = Rows("none")
ODD = Rows("odd")


class Grid:
    """The dims of a padded batch.

    ``batch``: how many sequences there are, ``times`` the dim ``sequences``. ``lengths``: how long
    they are, variables of the function.
    """

    def __init__(self, batch: Any, lengths: Sequence[tirx.Var]) -> None:
        known = factor_and_dim(batch)
        assert known is not None
        self.batch, self.lengths = batch, tuple(lengths)
        self.times, self.sequences = known
        self._batch = from_tirx(batch)
        self._dims = frozenset({self.sequences.name, *(length.name for length in lengths)})
        self._sizes = [from_tirx(length) for length in lengths]
        self._cuts: list[tuple[Any, int, int]] = []  # extent, length, start
        self._known: dict[Any, _Role | None] = {}

    def add_cut(self, of: int, extent: Any, start: int) -> None:
        """Enter a part of the positions of a length."""
        self._cuts.append((extent, of, start))
        self._sizes.append(from_tirx(extent))
        self._known.clear()

    def whole_of(self, of: int) -> int:
        """Return which length it is, or is a cut of."""
        return of if of < len(self.lengths) else self._cuts[of - len(self.lengths)][1]

    def cut(self, of: int) -> tuple[Any, int] | None:
        """Return the extent and the start of a cut; None: it is a length."""
        if of < len(self.lengths):
            return None
        extent, _, start = self._cuts[of - len(self.lengths)]
        return extent, start

    def rows(self, kind: Any) -> Rows:
        """Find the rows of a tensor type; of other types there are none."""
        if not isinstance(kind, relax.TensorType):
            return NO_ROWS
        if not isinstance(kind.shape, relax.ShapeExpr):
            return ODD
        return self.rows_of_shape(kind.shape.values)

    def rows_of_shape(self, shape: Sequence[Any]) -> Rows:
        """Find the rows of a shape."""
        found: dict[str, int] = {}
        lengths: set[int] = set()
        for axis, extent in enumerate(shape):
            role = self._role(extent)
            if role is None:
                continue
            name, of = role
            if name in found:
                return ODD
            found[name] = axis
            lengths |= set() if of is None else {of}
        if not found:
            return NO_ROWS
        of = min(lengths, default=0)
        match sorted(found):
            case ["merged"]:
                return Rows("merged", found["merged"], found["merged"], of)
            case ["batch", "length"]:
                return Rows("both", found["batch"], found["length"], of)
            case ["batch"]:
                return Rows("batch", batch=found["batch"])
            case ["length"]:
                return Rows("length", length=found["length"], of=of)
        return ODD

    def mentions_sizes(self, expr: Any) -> bool:
        """Whether an argument that is no tensor is made of one of the dims."""
        if isinstance(expr, relax.ShapeExpr):
            return any(self._role(extent) is not None for extent in expr.values)
        if isinstance(expr, relax.Tuple):
            return any(map(self.mentions_sizes, expr.fields))
        return isinstance(expr.ty, tvm.ir.PrimType) and self._role(expr) is not None

    def _role(self, extent: Any) -> _Role | None:
        if isinstance(extent, int | tirx.IntImm | tirx.FloatImm):
            return None
        if extent not in self._known:
            self._known[extent] = self._find_role(extent)
        return self._known[extent]

    def _find_role(self, extent: Any) -> _Role | None:
        try:
            size = from_tirx(extent)
        except GraphError:
            return "odd", None
        if size == self._batch:
            return "batch", None
        for of, length in enumerate(self._sizes):
            if size == length:
                return "length", of
            if size == self._batch * length:
                return "merged", of
        names = {dim if isinstance(dim, str) else dim.name for dim in size.free_dims}
        return ("odd", None) if names & self._dims else None

    def strides(self, shape: Sequence[Any], rows: Rows) -> tuple[Any, Any] | None:
        """Elements between two sequences and between two positions; None where unknown."""
        try:
            inner = {axis: elements(shape[axis + 1 :]) for axis in rows.axes}
        except GraphError:
            return None
        if rows.layout == "merged":
            step = inner[rows.batch]
            return step * self._sizes[rows.of], step
        return inner.get(rows.batch), inner.get(rows.length)


def factor_and_dim(extent: Any) -> tuple[int, tirx.Var] | None:
    """Split an extent into a number and a dim; None: it is no product of these."""
    if isinstance(extent, tirx.Var):
        return 1, extent
    if not isinstance(extent, tirx.Mul):
        return None
    for number, dim in ((extent.a, extent.b), (extent.b, extent.a)):
        if isinstance(number, tirx.IntImm) and isinstance(dim, tirx.Var) and int(number) > 0:
            return int(number), dim
    return None


def constant_of(expr: Any) -> float | None:
    """Return the number that a constant without axes is; None for anything else."""
    if not isinstance(expr, tvm.ir.GenericConst) or not hasattr(expr.value, "numpy"):
        return None
    if expr.ty.ndim != 0:
        return None
    number = expr.value.numpy()
    return (number.astype("float32") if "bfloat16" in str(number.dtype) else number).item()
