"""Which rows of a padded batch its sums and attention ask for.

For each length that the sequences of a batch have, these are the rows

- that a sum over rows counts: of a loss, of a gradient;
- with causal attention all before the last of those, which are its keys;
- with a mask that hides keys, those that the mask leaves; what it hides is nobody's key.

Attention of one kind of sequences to another, as of a decoder to what an encoder has made, needs of
its keys what the mask leaves, and leaves the choice of queries to those sums.  Where nothing says
which rows of a length count, while it is known of another, all of its rows do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from tvm import relax, tirx
from tvm.ir import Op

from relax_disc.analysis.kernels.stages import constant
from relax_disc.analysis.padding.documents import with_places
from relax_disc.analysis.padding.grid import Grid, Rows, factor_and_dim
from relax_disc.analysis.padding.masked_rows import decided
from relax_disc.analysis.padding.values import (
    BATCH,
    KEY,
    LENGTH,
    QUERY,
    Elements,
    Value,
    conditions,
    is_readable,
    mentions,
    replaced,
    simplify,
)
from relax_disc.ops import registry
from relax_disc.ops.attention import optional_operands
from relax_disc.ops.attention.library import is_computed_by_library, needs_native_kernels

ATTENTION = (
    "relax_disc.attention",
    "relax_disc.attention_backward",
    "relax_disc.attention_backward_trained",
)
SOFTMAX = "relax.nn.softmax"
LOSS = ("relax_disc.cross_entropy", "relax_disc.cross_entropy_backward")
_FURTHER: Value = ("index", "further")
# The kernels of attention take scores in powers of two: a number beyond this is an infinity there.
_HIDES = float(numpy.finfo("float32").min) / math.log2(math.e)

Note = Callable[[Any, str], None]
"""Takes a binding, or None, and why all rows are needed."""


@dataclass(frozen=True, slots=True)
class Needed:
    """The rows of one length that a step needs.

    Expressions are those of `values` over ``batch`` and ``length``.
    """

    counted: Value  # true where a sum over rows can have a part
    kept: Value | None  # true where a mask leaves the row, a key; None: there is no mask
    is_prefix: bool  # whether all before the last counted row are needed
    shown: Value | None = None  # keys that every mask leaves which hides by a number; None: all
    is_near: bool = False  # whether such a mask may hide all keys before a row but its own

    @property
    def is_all(self) -> bool:
        """Whether no row can be left out."""
        return self.counted is True


ALL = Needed(True, None, is_prefix=False)


def find_grid(bindings: Sequence[Any], note: Note) -> Grid | None:
    """Take the dims of the batch from attention; None: there are none, and `note` is told why."""
    batch, lengths = None, []
    names = {operator_of(binding.value) for binding in bindings}
    wanted = ATTENTION[0] if ATTENTION[0] in names else SOFTMAX
    for binding in bindings:
        if operator_of(binding.value) != wanted:
            continue
        for outer, length in _outer_and_length(binding.value):
            batch = outer if batch is None else batch
            known = factor_and_dim(batch)
            if known is None or not _are_same(outer, batch) or not _is_other(length, known[1]):
                note(binding, "batch and length are not two dims of their own")
                return None
            if not any(length.same_as(each) for each in lengths):
                lengths.append(length)
    if batch is None:
        note(None, "there is no attention of sequences of the batch")
        return None
    return Grid(batch, lengths)


def _outer_and_length(call: Any) -> list[tuple[Any, Any]]:
    """Extents of batch and length of an attention's queries and keys, or of scores of pairs."""
    if call.op.name == ATTENTION[0]:
        extents = [registry.extents(operand.ty) for operand in call.args[:2]]
        return [(outer, length) for outer, _, length, _ in extents]
    if not _is_of_pairs(call):
        return []
    outer, _, *lengths = registry.extents(call.ty)
    return [(outer, length) for length in lengths]


def _is_of_pairs(call: Any) -> bool:
    """Whether a softmax is one over keys of scores ``[batch, heads, queries, keys]``."""
    if not isinstance(call.ty.shape, relax.ShapeExpr) or call.ty.ndim != 4:
        return False
    outer, _, query, key = call.ty.shape.values
    is_last = int(call.attrs.axis) % 4 == 3
    are_dims = isinstance(query, tirx.Var) and isinstance(key, tirx.Var)
    return is_last and factor_and_dim(outer) is not None and are_dims


def _are_same(one: Any, other: Any) -> bool:
    """Whether two extents are the same number of times the same dim."""
    split = [factor_and_dim(extent) for extent in (one, other)]
    if split[0] is None or split[1] is None:
        return False
    (times, dim), (more, same) = split[0], split[1]
    return times == more and dim.same_as(same)


def _is_other(length: Any, sequences: tirx.Var) -> bool:
    return isinstance(length, tirx.Var) and not length.same_as(sequences)


def find_seen(
    bindings: Sequence[Any], grid: Grid, elements: Elements, kind: str, note: Note
) -> tuple[list[Seen], dict[Any, Any]] | None:
    """Find what attention asks for, of each length; None: all rows, and `note` is told why.

    Returned with it: the softmaxes of scores of pairs, each with its mask, which is among that.
    ``kind``: of the target, whose library has to have kernels for packed rows.
    """
    if kind not in ("llvm", "cuda"):
        note(None, f"there are no kernels for packed sequences on {kind}")
        return None
    seen = [Seen() for _ in grid.lengths]
    reader, definitions = _Reader(grid, elements, note, seen), {b.var: b.value for b in bindings}
    softmaxes: dict[Any, Any] = {}
    for binding in bindings:
        name = operator_of(binding.value)
        if kind == "cuda" and name in ATTENTION and needs_native_kernels(binding.value):
            reason = "on cuda there is no library kernel for {} of attention over packed sequences"
            is_trained = name == ATTENTION[2]
            what = "the gradient of the mask" if is_trained else "dropout"
            note(binding, reason.format(what))
            return None
        if name == ATTENTION[0] and not reader.see_attention(binding):
            return None
        if name == SOFTMAX and kind == "llvm" and _is_of_pairs(binding.value):
            mask = reader.see_softmax(binding.value, definitions)
            if mask is not None:
                softmaxes[binding.var] = mask
    return seen, softmaxes


def operator_of(value: Any) -> str | None:
    """Name the operator that a value is a call of; None: it is no call of one."""
    is_call = isinstance(value, relax.Call) and isinstance(value.op, Op)
    return value.op.name if is_call else None


@dataclass(slots=True)
class Seen:
    """What attention asks for of the rows of one length."""

    is_causal: bool = True
    masks: set[Value] | None = None  # that every attention to these rows has
    shown: set[Value] = field(default_factory=set)  # conditions of masks that hide by a number
    is_near: bool = False  # whether one of these hides keys before a row, as a window does

    def needed(self, counted: Sequence[Value]) -> Needed | str:
        """Return the rows that are needed where some are counted, or why that is not known."""
        masks = sorted(self.masks or (), key=repr)
        if not counted and not masks:
            return "there is no loss over the positions that a label or a mask counts, no mask"
        if not masks and not self.is_causal:
            return "attention is neither causal nor has one mask that hides padding"
        kept, shown = _all_of(masks), _all_of(sorted(self.shown, key=repr))
        if not counted:
            return Needed(False, kept, False, shown, self.is_near)
        some = counted[0] if len(counted) == 1 else ("or", *counted)
        return Needed(some, kept, self.is_causal, shown, self.is_near)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads attention."""

    grid: Grid
    elements: Elements
    note: Note
    seen: list[Seen]  # by length

    def see_attention(self, binding: Any) -> bool:
        call = binding.value
        q, k, v = call.args[:3]
        rows = [self.grid.rows(operand.ty) for operand in (q, k, v)]
        if any((each.layout, each.batch, each.length) != ("both", 0, 2) for each in rows):
            self.note(binding, "attention is not of sequences of the batch")
            return False
        if not is_computed_by_library(q, k, v):
            self.note(binding, "no library kernel takes heads of this width or type")
            return False
        if any(self.grid.cut(each.of) for each in rows):
            self.note(binding, "attention is of a part of the positions")
            return False
        is_causal, is_cross = bool(call.attrs["is_causal"]), rows[0].of != rows[1].of
        if is_causal and is_cross:
            self.note(binding, "attention between two sequences is causal")
            return False
        found, is_number = self._conditions(call)
        found = with_places(found, self.elements.is_whole)
        if not self._note_masks(found, is_number, is_causal, rows):
            self.note(binding, "its mask may hide all keys of a position, by a number")
            return False
        return True

    def see_softmax(self, call: Any, definitions: Mapping[Any, Any]) -> Any:
        """Note the mask of scores of pairs, and return it.

        None: it is not found, or may hide all keys of a position.

        It is to hide by a number, or each position is to see its own key: weights of rows that
        are not needed are to be finite.
        """
        query, key = (self.grid.rows_of_shape([n]) for n in call.ty.shape.values[2:])
        if (query.layout, key.layout) != ("length", "length"):
            return None
        if self.grid.cut(query.of) or self.grid.cut(key.of):
            return None
        if self.grid.rows_of_shape(call.ty.shape.values[:1]).layout != "batch":
            return None
        read = self._mask_of_scores(call.args[0], definitions)
        if read is None:
            return None
        mask, found, is_number = read
        found = with_places(found, self.elements.is_whole)
        if not is_number and not (query.of == key.of and all(map(_shows_own, found))):
            return None
        return mask if self._note_masks(found, is_number, False, [query, key]) else None

    def _mask_of_scores(
        self, scores: Any, definitions: Mapping[Any, Any]
    ) -> tuple[Any, list[Value], bool] | None:
        """Find the mask that is added to scores, or that fills them with a number."""
        call = definitions.get(scores, scores)
        name, indices = operator_of(call), [BATCH, ("index", "head"), QUERY, KEY]
        if name == "relax.astype" and registry.dtype_name(call.ty) in ("float32", "float64"):
            return self._mask_of_scores(call.args[0], definitions)
        if name == "relax.add":
            for part in call.args:
                if isinstance(part.ty, relax.TensorType) and part.ty.ndim <= 4:
                    own = registry.extents(part.ty)
                    at = indices[4 - len(own) :]
                    value = self.elements.value(
                        part, [0 if constant(n) == 1 else i for n, i in zip(own, at, strict=True)]
                    )
                    read = _hiding(value)
                    if read is not None:
                        return (part, *read)
            for part in call.args:
                read = self._mask_of_scores(part, definitions)
                if read is not None:
                    return read
        if name == "relax.where":
            own = registry.extents(call.args[0].ty)
            at = [
                0 if constant(n) == 1 else i
                for n, i in zip(own, indices[len(indices) - len(own) :], strict=True)
            ]
            condition = self.elements.value(call.args[0], at)
            sides = [self.elements.value(side, []) for side in call.args[1:] if side.ty.ndim == 0]
            if len(sides) == 1:
                filled = call.args[1].ty.ndim == 0
                pair = (sides[0], 0.0) if filled else (0.0, sides[0])
                read = _hiding(simplify(("choose", condition, *pair)))
                return None if read is None else (call.args[0], *read)
        return None

    def _note_masks(
        self, found: list[Value], is_number: bool, is_causal: bool, rows: Sequence[Rows]
    ) -> bool:
        """Note what a mask leaves; False: it may hide all keys of a position, by a number."""
        is_cross = rows[0].of != rows[1].of
        masks = {
            replaced(each, KEY, LENGTH)
            for each in found
            if _is_about_keys(each) and is_readable(each)
        }
        keys = self.seen[rows[1].of]
        keys.is_causal &= not is_cross and (is_causal or any(map(_hides_later, found)))
        keys.masks = masks if keys.masks is None else keys.masks & masks
        if is_number:
            rest = [each for each in found if not _is_about_keys(each)]
            # A position that the mask hides may see nothing, if it is hidden as a key, too.
            own = [each for each in rest if replaced(each, QUERY, LENGTH) not in masks]
            if is_cross and rest:
                return False
            if not all(map(_shows_own, own)):
                return False
            keys.shown |= masks
            keys.is_near |= not all(map(_shows_before, rest))
        return True

    def _conditions(self, call: Any) -> tuple[list[Value], bool]:
        """List what must hold for a query to see a key, as far as a mask can be read.

        And whether what is hidden is hidden by a number: where all is, all is read.
        """
        mask, _ = optional_operands(call, 3)
        if not mask:
            return [], False
        places = [BATCH, ("index", "head"), QUERY, KEY]
        indices = [
            0 if isinstance(n, tirx.IntImm) and int(n) == 1 else place
            for n, place in zip(registry.extents(mask[0].ty), places, strict=True)
        ]
        value = self.elements.value(mask[0], indices)
        if registry.dtype_name(mask[0].ty) == "bool":
            return conditions(value), False
        if isinstance(value, tuple) and value[0] == "biased":
            value = value[1]
        return _hiding(value) or ([], False)


def _hiding(value: Value) -> tuple[list[Value], bool] | None:
    """List what must hold for an element to be none that hides, and whether a number hides."""
    if isinstance(value, tuple) and value[0] == "choose":
        _, condition, one, other = value
        for seen, hidden in ((condition, other), (simplify(("not", condition)), one)):
            if isinstance(hidden, int | float) and hidden <= _HIDES:
                return conditions(seen), hidden > -math.inf
    return None


def _hides_later(condition: Value) -> bool:
    """Whether a condition of a mask holds for no key behind the query."""
    later = ("add", QUERY, ("add", _FURTHER, 1))
    return decided(replaced(condition, KEY, later)) is False


def _shows_before(condition: Value) -> bool:
    """Whether a condition of a mask holds for the query's own key and all before it."""
    return decided(replaced(condition, QUERY, ("add", KEY, _FURTHER))) is True


def _all_of(values: Sequence[Value]) -> Value | None:
    return None if not values else values[0] if len(values) == 1 else ("and", *values)


def _shows_own(condition: Value) -> bool:
    """Whether a condition of a mask holds for the key at the query's own position."""
    return decided(replaced(condition, KEY, QUERY)) is True


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
