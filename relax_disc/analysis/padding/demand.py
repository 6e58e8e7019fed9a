"""Which rows of a padded batch a step needs, and which of its tensors can do without the others.

Forward, every binding is asked two things: does it make each row from the same row of what it
reads, and is its result zero in the rows that are left out?  Zero are the gradient of a
cross-entropy where the label is ignored, and whatever follows from it row by row.  Backward, a
tensor is needed whole by whatever does not go row by row; all others are needed in the rows that
count.  These are, for each sequence:

- those that a label counts;
- with causal attention all before the last of those, which are its keys;
- with a mask that hides keys, those that the mask leaves; what it hides is nobody's key.

Without a label for each row those that the mask leaves are all: what is multiplied by the mask, as
a mean over the positions of a sequence is, is zero elsewhere.

So a row that is left out is read by none that is kept: the softmax of a kept row is over kept rows,
and the gradient that attention passes back is zero where it is left out.

Limits: one batch dim and one length dim, both symbolic; attention as one operator, of a sequence
to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from relax_disc.analysis.padding.grid import NO_ROWS, Grid, Rows, constant_of
from relax_disc.analysis.padding.operators import Operand, Use, describe
from relax_disc.analysis.padding.values import (
    BATCH,
    KEY,
    LENGTH,
    QUERY,
    ROW,
    Elements,
    Value,
    conditions,
    is_readable,
    mentions,
    replaced,
    simplify,
    vanishes,
)
from relax_disc.analysis.program.reader import bindings_of
from relax_disc.ops import registry
from relax_disc.ops.attention import optional_operands
from relax_disc.ops.attention.library import is_computed_by_library

ATTENTION = ("relax_disc.attention", "relax_disc.attention_backward")
LOSS = ("relax_disc.cross_entropy", "relax_disc.cross_entropy_backward")
_PRODUCTS = ("relax.matmul", *ATTENTION)
_CREATED = ("relax.zeros", "relax.ones", "relax.full")


@dataclass(frozen=True, slots=True)
class Needed:
    """The rows that a step needs, as expressions of `values` over ``batch`` and ``length``."""

    counted: Value  # true where a label counts
    kept: Value | None  # true where a mask leaves the row, a key; None: there is no mask
    is_prefix: bool  # whether all before the last counted row are needed


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
    needed : Needed or None
        The rows that the step needs; None: all.
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
    needed: Needed | None = None
    packed: frozenset[Any] = frozenset()
    whole: frozenset[Any] = frozenset()
    sums: frozenset[Any] = frozenset()
    zeros: frozenset[Any] = frozenset()
    reasons: tuple[Whole, ...] = ()


def find_padding(function: relax.Function, module: tvm.IRModule) -> Padding:
    """Find out which rows of a step's batch are needed, and for what."""
    analysis = _Analysis(function, module)
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


@dataclass(slots=True)
class _Seen:
    """What the attention and the losses of the function ask for."""

    is_causal: bool = True
    masks: set[Value] | None = None  # that every attention has
    counted: list[Value] = field(default_factory=list)


class _Analysis:
    def __init__(self, function: relax.Function, module: tvm.IRModule) -> None:
        self._function, self._module = function, module
        self._bindings = bindings_of(function)
        self._definitions = {binding.var: binding.value for binding in self._bindings}
        self._facts: dict[Any, _Facts] = {}
        self._reasons: list[Whole] = []

    def run(self) -> Padding:
        grid = self._find_grid()
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
        needed = self._find_needed()
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
            if _operator(binding.value) in _PRODUCTS and self._facts[binding.var].is_packable
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

    def _find_grid(self) -> Grid | None:
        """Take the dims from the first attention."""
        for binding in self._bindings:
            if _operator(binding.value) != ATTENTION[0]:
                continue
            batch, _, length, _ = registry.extents(binding.value.args[0].ty)
            if isinstance(batch, tirx.Var) and isinstance(length, tirx.Var):
                if not batch.same_as(length):
                    return Grid(batch, length)
            self._note(binding, "batch and length are not two dims of their own")
            return None
        self._note(None, "there is no attention that is one operator")
        return None

    # -- which rows ---------------------------------------------------------------------------

    def _find_needed(self) -> Needed | None:
        """Find the rows that losses and attention ask for."""
        seen = _Seen()
        for binding in self._bindings:
            name = _operator(binding.value)
            if name == ATTENTION[0] and not self._see_attention(binding, seen):
                return None
            if name == LOSS[0] and not self._see_loss(binding, seen):
                return None
        masks = sorted(seen.masks or (), key=repr)
        if not seen.counted and not masks:
            self._note(None, "there is no cross-entropy over the positions of the batch, no mask")
            return None
        counted = seen.counted[0] if len(seen.counted) == 1 else ("or", *seen.counted)
        if not masks and not seen.is_causal:
            self._note(None, "attention is neither causal nor has one mask that hides padding")
            return None
        kept = None if not masks else masks[0] if len(masks) == 1 else ("and", *masks)
        if not seen.counted:
            return Needed(False, kept, is_prefix=False)
        return Needed(counted, kept, seen.is_causal)

    def _vanishes(self, var: Any) -> bool:
        """Whether a tensor made of the mask alone is zero where rows are left out."""
        needed, rows = self._needed, self._grid.rows(var.ty)
        if needed.kept is None or needed.is_prefix or rows.layout != "both":
            return False
        indices: list[Value] = [("index", f"axis {k}") for k in range(len(var.ty.shape.values))]
        indices[rows.batch], indices[rows.length] = BATCH, LENGTH
        return vanishes(self._elements.value(var, indices), needed.kept)

    def _see_attention(self, binding: Any, seen: _Seen) -> bool:
        call = binding.value
        q, k, v = call.args[:3]
        mask, _ = optional_operands(call, 3)
        rows = [self._grid.rows(operand.ty) for operand in (q, k, v)]
        if any(each != Rows("both", 0, 2) for each in rows):
            self._note(binding, "attention is not of the sequences to themselves")
            return False
        if not is_computed_by_library(q, k, v):
            self._note(binding, "no library kernel takes heads of this width or type")
            return False
        found: list[Value] = []
        if mask:
            shape = registry.extents(mask[0].ty)
            places = [BATCH, ("index", "head"), QUERY, KEY]
            indices = [
                0 if isinstance(n, tirx.IntImm) and int(n) == 1 else place
                for n, place in zip(shape, places, strict=True)
            ]
            value = self._elements.value(mask[0], indices)
            if registry.dtype_name(mask[0].ty) == "bool":
                found = conditions(value)
        is_causal = bool(call.attrs["is_causal"]) or any(map(_hides_later, found))
        masks = {
            replaced(each, KEY, LENGTH)
            for each in found
            if _is_about_keys(each) and is_readable(each)
        }
        seen.is_causal &= is_causal
        seen.masks = masks if seen.masks is None else seen.masks & masks
        return True

    def _see_loss(self, binding: Any, seen: _Seen) -> bool:
        logits, target = binding.value.args[:2]
        if self._grid.rows(logits.ty).layout != "merged":
            return True  # another loss: what it needs follows from how it is computed
        label = self._elements.value(target, [ROW])
        if not is_readable(label):
            self._note(binding, "the labels are not plain parts of the batch")
            return False
        ignored = int(binding.value.attrs["ignore_index"])
        seen.counted.append(simplify(("ne", label, ignored)))
        return True

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
        name = _operator(value)
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
        if name == ATTENTION[1]:
            zero = self._operand(binding.value.args[0]).is_zero
            return _Facts(rows, (zero,) * 3, True, Use("by_row"))
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
        return Operand(expr.ty, facts.rows[0], facts.is_zero[0])

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
        what = "" if binding is None else str(_operator(binding.value) or binding.var.name)
        self._reasons.append(Whole(line, what.removeprefix("relax."), reason))


def _operator(value: Any) -> str | None:
    is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
    return value.op.name if is_call else None


def _has_payload(kind: Any, rows: Rows) -> bool:
    """Whether a float tensor has more than one number for each row."""
    if not registry.dtype_name(kind).startswith(("float", "bfloat")):
        return False
    others = [n for axis, n in enumerate(kind.shape.values) if axis not in rows.axes]
    return any(not (isinstance(n, tirx.IntImm) and int(n) == 1) for n in others)


def _hides_later(condition: Value) -> bool:
    """Whether a condition of a mask holds only for keys that are not behind the query."""
    return condition in (
        ("le", KEY, QUERY),
        ("ge", QUERY, KEY),
        ("lt", KEY, QUERY),
        ("gt", QUERY, KEY),
    )


def _is_about_keys(condition: Value) -> bool:
    """Whether a condition asks a mask of the batch about the key alone."""
    indices: set[Any] = set()

    def collect(value: Value) -> None:
        if isinstance(value, tuple):
            if value[0] == "index":
                indices.add(value)
            for part in value[1:]:
                collect(part)

    collect(condition)
    return mentions(condition, "load") and KEY in indices and indices <= {BATCH, KEY}


def names_of_loads(value: Value) -> set[str]:
    """Name the parameters that an expression reads."""
    if not isinstance(value, tuple):
        return set()
    own = {value[1]} if value[0] == "load" else set()
    return own.union(*(names_of_loads(part) for part in value[1:]))
