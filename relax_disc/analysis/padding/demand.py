"""Which rows of a padded batch a step needs, and which of its tensors can do without the others.

Forward, every binding is asked two things: does it make each row from the same row of what it
reads, and is its result zero in the rows that are left out?  Zero are the gradient of a
cross-entropy where the label is ignored, and whatever follows from it row by row.  Backward, a
tensor is needed whole by whatever does not go row by row; all others are needed in the rows that
count (:mod:`relax_disc.analysis.padding.needed`).

Without a label for each row those that the mask leaves are all: what is multiplied by the mask, as
a mean over the positions of a sequence is, is zero elsewhere.

So a row that is left out is read by none that is kept: the softmax of a kept row is over kept rows,
and the gradient that attention passes back is zero where it is left out.

Limits: one batch dim, symbolic as all lengths are; attention as one operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx

from relax_disc.analysis.padding.grid import NO_ROWS, Grid, Rows, constant_of
from relax_disc.analysis.padding.needed import (
    ATTENTION,
    LOSS,
    Needed,
    find_grid,
    find_needed,
    operator_of,
)
from relax_disc.analysis.padding.operators import Operand, Use, describe
from relax_disc.analysis.padding.values import BATCH, LENGTH, Elements, Value, vanishes
from relax_disc.analysis.program.reader import bindings_of
from relax_disc.ops import registry

_PRODUCTS = ("relax.matmul", *ATTENTION)
_CREATED = ("relax.zeros", "relax.ones", "relax.full")


@dataclass(frozen=True, slots=True)
class Whole:
    """A binding that needs all rows of what it reads."""

    line: str  # of the model, empty where unknown
    what: str  # operator
    reason: str


@dataclass(frozen=True)
class Padding:
    """What is known of the padding of a function's batch.

    Attributes
    ----------
    grid : Grid or None
        Dims of the batch; None where they were not found.
    needed : tuple of Needed or None
        The rows that the step needs, by length of the grid; None: all.
    packed : frozenset of Var
        Tensors, and tuples of tensors, of which the rows needed are enough.
    whole : frozenset of Var
        Those that are computed as they were.
    sums : frozenset of Var
        Those of ``whole`` that are sums over rows, computed from those needed.
    zeros : frozenset of Var
        Those of ``whole`` that are zero in the rows that are left out.
    reasons : tuple of Whole
        Why rows that do not count are needed, in the order of the program.
    """

    grid: Grid | None = None
    needed: tuple[Needed, ...] | None = None
    packed: frozenset[Any] = frozenset()
    whole: frozenset[Any] = frozenset()
    sums: frozenset[Any] = frozenset()
    zeros: frozenset[Any] = frozenset()
    reasons: tuple[Whole, ...] = ()


def find_padding(function: relax.Function, module: tvm.IRModule, kind: str = "llvm") -> Padding:
    """Find out which rows of a step's batch are needed, and for what, on a target of this kind."""
    analysis = _Analysis(function, module, kind)
    return analysis.run()


def parts_of(expr: Any) -> Iterator[Any]:
    """Yield the tensors and tuples that an expression reads, those written into tuples too."""
    if isinstance(expr, relax.Call):
        for arg in expr.args:
            yield from _leaves(arg)
    elif isinstance(expr, relax.TupleGetItem):
        yield expr.tuple_value
    else:
        yield from _leaves(expr)


def _leaves(expr: Any) -> Iterator[Any]:
    if isinstance(expr, relax.Tuple):
        for part in expr.fields:
            yield from _leaves(part)
    elif isinstance(expr, relax.Var | tvm.ir.GenericConst):
        if isinstance(expr.ty, relax.TensorType | relax.TupleType):
            yield expr


@dataclass(slots=True)
class _Facts:
    """What is known of one variable."""

    rows: tuple[Rows, ...]  # of each element of a tuple
    is_zero: tuple[bool, ...]
    is_packable: bool = False
    use: Use | None = None  # of what it is bound to


class _Analysis:
    def __init__(self, function: relax.Function, module: tvm.IRModule, kind: str) -> None:
        self._function, self._module, self._kind = function, module, kind
        self._bindings = bindings_of(function)
        self._definitions = {binding.var: binding.value for binding in self._bindings}
        self._facts: dict[Any, _Facts] = {}
        self._reasons: list[Whole] = []

    def run(self) -> Padding:
        grid = find_grid(self._bindings, self._note)
        if grid is None:
            return Padding(reasons=tuple(self._reasons))
        self._grid = grid
        kinds = (self._function.attrs or {}).get("relax_disc.param_kinds") or ()
        batch = [
            param
            for param, kind in zip(self._function.params, kinds, strict=False)
            if str(kind) == "batch" and registry.dtype_name(param.ty) not in ("float16", "bfloat16")
        ]
        self._elements = Elements(self._definitions, batch, self._module, grid)
        needed = find_needed(self._bindings, grid, self._elements, self._kind, self._note)
        if needed is None:
            return Padding(grid, reasons=tuple(self._reasons))
        self._needed = needed
        for param in self._function.params:
            self._facts[param] = _Facts((grid.rows(param.ty),), (self._vanishes(param),))
        for binding in self._bindings:
            self._facts[binding.var] = self._describe(binding)
        packed, whole = self._demand()
        dear = [
            binding
            for binding in self._bindings
            if operator_of(binding.value) in _PRODUCTS and self._facts[binding.var].is_packable
        ]
        if not dear or any(binding.var in whole for binding in dear):
            if not dear:
                self._note(None, "no matrix product or attention has rows that can be left out")
            return Padding(grid, reasons=tuple(self._reasons))
        sums = {var for var in whole if self._is_sum(var)}
        zeros = {var for var in whole if self._facts[var].is_zero == (True,)}
        return Padding(
            grid,
            needed,
            frozenset(packed),
            frozenset(whole),
            frozenset(sums),
            frozenset(zeros),
            tuple(self._reasons),
        )

    def _vanishes(self, var: Any) -> bool:
        """Whether a tensor made of the mask alone is zero where rows are left out."""
        rows = self._grid.rows(var.ty)
        needed = self._needed[rows.of]
        if needed.kept is None or needed.is_prefix or rows.layout != "both":
            return False
        indices: list[Value] = [("index", f"axis {k}") for k in range(len(var.ty.shape.values))]
        indices[rows.batch], indices[rows.length] = BATCH, LENGTH
        return vanishes(self._elements.value(var, indices), needed.kept)

    # -- what is known of each tensor ---------------------------------------------------------

    def _describe(self, binding: Any) -> _Facts:
        value, kind = binding.value, binding.var.ty
        fields = list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]
        rows = tuple(self._grid.rows(each) for each in fields)
        nothing = _Facts(rows, (False,) * len(rows))
        if isinstance(value, relax.Var):
            return self._facts[value]
        if isinstance(value, relax.TupleGetItem):
            whole = self._facts.get(value.tuple_value)
            if whole is None:
                return nothing
            own = whole.rows[value.index].has_rows
            use = Use("by_row" if own else "sum") if whole.is_packable else None
            zero = (whole.is_zero[value.index],)
            return _Facts(rows, zero, whole.is_packable and own, use)
        name = operator_of(value)
        operands = [self._operand(part) for part in parts_of(value)]
        reads_packable = any(self._is_packable(part) for part in parts_of(value))
        if isinstance(value, relax.Tuple):
            return _Facts(
                rows, nothing.is_zero, use=Use("any", reason="it is a result of the step")
            )
        if name is None or not all(isinstance(each, Operand) for each in operands):
            return _Facts(rows, nothing.is_zero, use=Use("any", reason="it reads tuples"))
        if name in ATTENTION or name in LOSS:
            return self._special(binding, name, rows, reads_packable)
        if name in _CREATED:
            return nothing
        is_large = any(
            each.has_rows and _has_payload(part, each)
            for part, each in zip(fields, rows, strict=True)
        )
        if not reads_packable and not (is_large and operands):
            is_small = isinstance(kind, relax.TensorType) and not is_large
            return _Facts(rows, (self._vanishes(binding.var),)) if is_small else nothing
        use = describe(value, operands, self._grid, self._module)
        if use.effect != "by_row":
            return _Facts(rows, nothing.is_zero, False, use if reads_packable else None)
        if not all(each.has_rows for each in rows):
            return _Facts(rows, nothing.is_zero, use=Use("any", reason="its result has no rows"))
        return _Facts(rows, use.is_zero, True, use)

    def _special(
        self, binding: Any, name: str, rows: tuple[Rows, ...], reads_packable: bool
    ) -> _Facts:
        """Attention and cross-entropy, of which it is known which rows they read."""
        nothing = (False,) * len(rows)
        if name == ATTENTION[0]:
            return _Facts(rows, nothing, True, Use("by_row"))
        if name in ATTENTION:
            zero = self._operand(binding.value.args[0]).is_zero
            return _Facts(rows, (zero,) * len(rows), True, Use("by_row"))
        if not reads_packable:
            return _Facts(rows, nothing)
        if name == LOSS[0]:
            is_none = binding.value.attrs["reduction"] == "none"
            return _Facts(rows, (is_none, False, False), True, Use("by_row"))
        return _Facts(rows, (rows[0].layout == "merged",), True, Use("by_row"))

    def _operand(self, expr: Any) -> Any:
        bound = self._definitions.get(expr, expr) if isinstance(expr, relax.Var) else expr
        if isinstance(bound, tvm.ir.GenericConst):
            return Operand(expr.ty, NO_ROWS, False, constant_of(bound))
        facts = self._facts[expr]
        if not isinstance(expr.ty, relax.TensorType):
            return None
        rows = facts.rows[0]
        is_zero = facts.is_zero[0] or (rows.has_rows and self._needed[rows.of].is_all)
        return Operand(expr.ty, rows, is_zero)

    def _is_packable(self, expr: Any) -> bool:
        return isinstance(expr, relax.Var) and self._facts[expr].is_packable

    # -- who needs what -----------------------------------------------------------------------

    def _demand(self) -> tuple[set[Any], set[Any]]:
        """Go from the results back to what they need: packed, whole, or both."""
        packed: set[Any] = set()
        whole: set[Any] = set()
        result = self._function.body.body
        whole.update(_leaves(result))
        for binding in reversed(self._bindings):
            var, facts = binding.var, self._facts[binding.var]
            parts = [part for part in parts_of(binding.value) if isinstance(part, relax.Var)]
            if var in whole:
                for part in parts:
                    if self._is_sum(var) and self._facts[part].is_packable:
                        packed.add(part)
                        continue
                    if self._facts[part].is_packable and facts.use is not None:
                        if facts.use.effect == "any":
                            self._note(binding, facts.use.reason)
                    whole.add(part)
            elif var in packed:
                for part in parts:
                    (packed if self._facts[part].is_packable else whole).add(part)
        self._reasons.reverse()
        return packed, whole

    def _is_sum(self, var: Any) -> bool:
        use = self._facts[var].use
        return use is not None and use.effect == "sum"

    def _note(self, binding: Any, reason: str) -> None:
        span = None if binding is None else getattr(binding.value, "span", None) or binding.span
        line = "" if span is None else f"{span.source_name.name}:{span.line}"
        what = "" if binding is None else str(operator_of(binding.value) or binding.var.name)
        self._reasons.append(Whole(line, what.removeprefix("relax."), reason))


def _has_payload(kind: Any, rows: Rows) -> bool:
    """Whether a float tensor has more than one number for each row."""
    if not registry.dtype_name(kind).startswith(("float", "bfloat")):
        return False
    others = [n for axis, n in enumerate(kind.shape.values) if axis not in rows.axes]
    return any(not (isinstance(n, tirx.IntImm) and int(n) == 1) for n in others)
