"""Which rows of a padded batch a step needs, and which of its tensors can do without the others.

Forward, every binding is asked two things: does it make each row from the same row of what it
reads, and in which rows can its result be other than zero (its *support*,
:mod:`relax_disc.analysis.padding.support`)?  The gradient of a cross-entropy is zero where the
label is ignored, what a mask is multiplied by where that is zero, and so is what follows from them
row by row.  Backward, from the results of the step: a sum over rows asks for the rows in its
support; whatever else does not go row by row needs its operands whole; all others are needed in
the rows that are asked for, and in those that attention reads for them
(:mod:`relax_disc.analysis.padding.needed`).

So a row that is left out is read by none that is kept: the softmax of a kept row is over kept rows,
and the gradient that attention passes back is zero where it is left out.

What does not go row by row may still be computed from rows that are laid out in the padded batch:
:mod:`relax_disc.analysis.padding.islands`.

Limits: one batch dim, symbolic as all lengths are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from relax_disc.analysis.padding.grid import NO_ROWS, Grid, Rows, constant_of
from relax_disc.analysis.padding.islands import (
    EXACT,
    Partial,
    describe_island,
    laid_out,
    weights_of,
)
from relax_disc.analysis.padding.moves import Move, move_of
from relax_disc.analysis.padding.needed import (
    ALL,
    ATTENTION,
    LOSS,
    SOFTMAX,
    Needed,
    Seen,
    find_grid,
    find_seen,
    operator_of,
)
from relax_disc.analysis.padding.operators import Operand, Use, describe
from relax_disc.analysis.padding.support import AT_NEEDED, NEEDED, Support, in_all, support_of
from relax_disc.analysis.padding.values import (
    BATCH,
    LENGTH,
    ROW,
    Elements,
    Value,
    is_readable,
    is_truth,
    mentions_others,
    replaced,
    simplify,
    size_of,
    sizes_in,
)
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

    ``grid``: dims of the batch; None where they were not found. ``needed``: the rows that the step
    needs, by length of the grid; None: all. ``packed``: tensors, and tuples of tensors, of which
    the rows needed are enough. ``whole``: those that are computed as they were. ``sums``: those of
    ``whole`` that are sums over rows, computed from those needed. ``zeros``: those of ``whole``
    that are zero in the rows that are left out. ``islands``: those of ``whole`` that read packed
    rows laid out in the padded batch. ``moves``: what takes a part of the positions of
    rows, or puts one back. ``reasons``: why rows that do not count are needed, in the order of the
    program.
    """

    grid: Grid | None = None
    needed: tuple[Needed, ...] | None = None
    packed: frozenset[Any] = frozenset()
    whole: frozenset[Any] = frozenset()
    sums: frozenset[Any] = frozenset()
    zeros: frozenset[Any] = frozenset()
    islands: frozenset[Any] = frozenset()
    moves: Mapping[Any, Move] = field(default_factory=dict)
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
    support: tuple[Support, ...]
    is_packable: bool = False
    use: Use | None = None  # of what it is bound to
    asks: tuple[tuple[int, Support], ...] = ()  # for rows of lengths, where it is needed
    partial: Partial | None = None  # what is known of an island
    laid: tuple[int, Support] | None = None  # rows that make it whole, where those are laid out


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
            return Padding(reasons=self._why())
        self._grid = grid
        kinds = (self._function.attrs or {}).get("relax_disc.param_kinds") or ()
        named = [
            (str(kind), each) for each, kind in zip(self._function.params, kinds, strict=False)
        ]
        halves = ("float16", "bfloat16")
        batch = [
            x for kind, x in named if kind == "batch" and registry.dtype_name(x.ty) not in halves
        ]
        tables = [x for kind, x in named if kind == "parameter"]
        self._elements = Elements(self._definitions, batch, self._module, grid, tables)
        self._moves = self._find_moves()
        found = find_seen(self._bindings, grid, self._elements, self._kind, self._note)
        if found is None:
            return Padding(grid, reasons=self._why())
        seen, self._softmaxes = found
        needed, packed, whole = self._settle(seen)
        dear = [
            binding
            for binding in self._bindings
            if operator_of(binding.value) in _PRODUCTS and self._facts[binding.var].is_packable
        ]
        if not dear:
            self._note(None, "no matrix product or attention has rows that can be left out")
        if needed is None or not dear or any(binding.var in whole for binding in dear):
            return Padding(grid, reasons=self._why())
        sums = {var for var in whole if self._is_sum(var)}
        zeros = {
            var
            for var in whole
            if len(self._facts[var].support) == 1 and self._facts[var].support[0] is not None
        }
        return Padding(
            grid,
            needed,
            frozenset(packed),
            frozenset(whole),
            frozenset(sums),
            frozenset(zeros),
            frozenset(self._islands),
            {var: move for var, move in self._moves.items() if self._facts[var].use is not None},
            self._why(),
        )

    def _settle(self, seen: list[Seen]) -> tuple[tuple[Needed, ...] | None, set[Any], set[Any]]:
        """Find the rows that are needed, and what needs which tensors.

        A length of which nothing says what counts is computed whole, so its rows are not zero.
        """
        before, self._all = list(self._reasons), frozenset[int]()
        while True:
            self._reasons = list(before)
            for param in self._function.params:
                self._facts[param] = self._small(param, None)
            for binding in self._bindings:
                self._facts[binding.var] = self._describe(binding)
            packed, whole, counted = self._demand()
            found = [each.needed(rows) for each, rows in zip(seen, counted, strict=True)]
            unknown = {of for of, each in enumerate(found) if isinstance(each, str)}
            if unknown <= self._all or len(unknown) == len(found):
                break
            self._all |= unknown
        for length, each in zip(self._grid.lengths, found, strict=True):
            if isinstance(each, str):
                self._note(None, (f"{length.name}: " if len(found) > 1 else "") + each)
        if len(unknown) == len(found):
            return None, packed, whole
        is_all = [of in self._all for of in range(len(found))]
        needed = [
            ALL if whole_length or isinstance(each, str) else each
            for whole_length, each in zip(is_all, found, strict=True)
        ]
        return tuple(needed), packed, whole

    def _find_moves(self) -> dict[Any, Move]:
        """Find kernels that take a part of the positions, or put one back; enter cuts."""
        moves: dict[Any, Move] = {}
        starts: dict[Any, set[int]] = {}
        for binding in self._bindings:
            move = move_of(binding.value, self._module, self._elements)
            if move is None:
                continue
            kinds = binding.value.args[1].fields[0].ty, binding.var.ty
            whole = self._grid.rows(kinds[move.kind in ("pad", "spread")])
            if (whole.layout, whole.batch, whole.length) != ("both", 0, move.axis):
                continue
            length = self._grid.lengths[self._grid.whole_of(whole.of)].name
            if move.at == -1 and not sizes_in(move.start) <= {length}:
                continue
            moves[binding.var] = move
            if move.kind == "cut" and registry.dtype_name(kinds[1]).startswith(("float", "bfloat")):
                key = whole.of, kinds[1].shape.values[move.axis]
                starts.setdefault(key, set()).add(move.start)
        for (of, extent), found in starts.items():
            if len(found) == 1:
                self._grid.add_cut(of, extent, *found)
        return moves

    # -- what is known of each tensor ---------------------------------------------------------

    def _describe(self, binding: Any) -> _Facts:
        value, kind = binding.value, binding.var.ty
        fields = list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]
        rows = tuple(self._grid.rows(each) for each in fields)
        nothing = _Facts(rows, (None,) * len(rows))
        if isinstance(value, relax.Var):
            return self._facts[value]
        if isinstance(value, relax.TupleGetItem):
            whole = self._facts.get(value.tuple_value)
            if whole is None:
                return nothing
            own = whole.rows[value.index].has_rows
            use = Use("by_row" if own else "sum") if whole.is_packable else None
            support = (whole.support[value.index],)
            return _Facts(rows, support, whole.is_packable and own, use)
        name = operator_of(value)
        parts = list(parts_of(value))
        operands = [self._operand(part) for part in parts]
        is_odd = any(not self._is_of_rows(part) for part in parts)
        reads_packable = any(self._is_packable(part) or self._is_tracked(part) for part in parts)
        if isinstance(value, relax.Tuple):
            return _Facts(
                rows, nothing.support, use=Use("any", reason="it is a result of the step")
            )
        if name is None or not all(isinstance(each, Operand) for each in operands):
            return _Facts(rows, nothing.support, use=Use("any", reason="it reads tuples"))
        if is_odd:  # some of its elements are not those of the padded batch
            return self._island(binding, operands, rows) or nothing
        if name in ATTENTION or name in LOSS:
            return self._special(binding, name, rows, reads_packable)
        if name in _CREATED:
            return nothing
        is_large = any(
            each.has_rows and _has_payload(part, each)
            for part, each in zip(fields, rows, strict=True)
        )
        move = self._moves.get(binding.var)
        is_put = move is not None and move.kind == "spread"  # the gradient of what is picked
        if not reads_packable and not is_put and not (is_large and operands):
            is_small = isinstance(kind, relax.TensorType) and not is_large
            return self._small(binding.var, (value, operands)) if is_small else nothing
        if move is not None and rows[0].layout != "odd":
            return self._moved(move, operands[0], rows[0])
        use = describe(value, operands, self._grid, self._module)
        if use.effect == "sum":
            asked = next(each.rows.of for each in operands if each.rows.has_rows)
            return _Facts(rows, nothing.support, False, use, ((asked, use.support[0]),))
        if use.effect == "any" and reads_packable:
            island = self._island(binding, operands, rows)
            if island is not None:
                return island
        if use.effect == "any":
            return _Facts(rows, nothing.support, False, use if reads_packable else None)
        if not all(each.has_rows for each in rows):
            return _Facts(rows, nothing.support, use=Use("any", reason="its result has no rows"))
        facts = _Facts(rows, use.support, True, use)
        if len(rows) == 1 and self._can_lay(kind, rows[0]):
            chosen = self._chosen(value) if name == "relax.where" else None
            if use.support[0] is not None:
                facts.laid = rows[0].of, use.support[0]
            elif chosen is not None:
                facts.laid, facts.partial = (rows[0].of, chosen), EXACT
        return facts

    def _can_lay(self, kind: Any, rows: Rows) -> bool:
        """Whether packed rows can be laid out in the padded batch, among zeros."""
        is_float = registry.dtype_name(kind).startswith(("float", "bfloat"))
        if self._kind != "llvm":  # the kernel that numbers rows is one of a CPU
            return False
        return is_float and rows.layout == "both" and self._grid.cut(rows.of) is None

    def _chosen(self, call: relax.Call) -> Support:
        """Return the rows of which a choice takes packed ones; None: it takes any, or of both."""
        condition, *sides = call.args
        found = [self._is_packable(side) or self._is_tracked(side) for side in sides]
        is_one = found in ([True, False], [False, True]) and isinstance(condition, relax.Var)
        if not is_one or not self._facts[condition].rows[0].has_rows:
            return None
        if self._is_packable(condition) or self._is_tracked(condition):
            return None
        rows = self._facts[condition].rows[0]
        rank = len(condition.ty.shape.values)
        if (rows.layout, rows.batch) != ("both", 0) or not self._is_packable(
            sides[found.index(True)]
        ):
            return None
        indices: list[Value] = [("index", f"axis {k}") for k in range(rank)]
        indices[rows.batch], indices[rows.length] = BATCH, LENGTH
        value = self._elements.value(condition, indices)
        value = simplify(("not", value)) if found[1] else value
        return self._in_whole(support_of(value), condition) if is_truth(value) else None

    def _moved(self, move: Move, operand: Operand, rows: Rows) -> _Facts:
        """What takes a part of the positions, or puts one back."""
        at_start: Support = frozenset({("eq", LENGTH, move.start)})
        nothing, by_row = (None,), Use("by_row")
        cuts = self._grid.cut(operand.rows.of), self._grid.cut(rows.of)
        starts = [None if cut is None else cut[1] for cut in cuts]
        match move.kind:
            case "cut" if starts == [None, move.start]:
                # Positions that are no part of the cut are not zero in the packed rows.
                return _Facts((rows,), nothing, True, by_row)
            case "pad" if starts == [move.start, None] and operand.support is not None:
                return _Facts((rows,), (operand.support,), True, by_row)
            case "pick" if cuts[0] is None and rows == Rows("batch", 0):
                asks = ((operand.rows.of, at_start),)
                return _Facts((rows,), nothing, False, Use("sum"), asks)
            case "spread" if cuts[1] is None and operand.rows == Rows("batch", 0):
                return _Facts((rows,), (at_start,), True, by_row)
        return _Facts((rows,), nothing, use=Use("any", reason="it takes a part of the rows"))

    def _island(
        self, binding: Any, operands: list[Operand], rows: tuple[Rows, ...]
    ) -> _Facts | None:
        """Return what is known of a tensor that is computed whole from packed rows; None: no such.

        Rows that are laid out are zero where they are not needed; in the padded batch they are, if
        all that may be other than zero are asked for.
        """
        call = binding.value
        read = list(parts_of(call))
        if len(read) != len(operands) or len(rows) != 1:
            return None
        given, asks = [], []
        for part, operand in zip(read, operands, strict=True):
            facts = self._facts.get(part) if isinstance(part, relax.Var) else None
            known: Partial | None = EXACT
            if facts is not None and facts.is_packable:
                is_zero, of = operand.support is not None, operand.rows.of
                can_lay = self._can_lay(operand.kind, operand.rows)
                known = laid_out(operand.rows, is_zero) if can_lay else None
                asks += [(of, operand.support)] if is_zero else []
            elif facts is not None and facts.partial is not None:
                known = facts.partial
            if known is None:
                return None
            given.append((operand, known))
        if operator_of(call) == SOFTMAX:
            scores, mask = given[0][1], self._softmaxes.get(binding.var)
            if mask is None or self._is_packable(mask) or self._is_tracked(mask):
                return None
            if scores.batch != (0, 1):
                return None
            found = weights_of(scores, 2, 3) if scores.tracked <= {2, 3} else None
        else:
            is_kernel = operator_of(call) == "relax.call_tir"
            kernel = self._module[call.args[0]] if is_kernel else None
            found = describe_island(call, given, self._grid, kernel)
        if found is None:
            return None
        support = (AT_NEEDED if found.is_zero_at(rows[0]) else None,)
        use = Use("island", reason="rows that are not needed are read behind it")
        return _Facts(rows, support, False, use, tuple(asks), found)

    def _special(
        self, binding: Any, name: str, rows: tuple[Rows, ...], reads_packable: bool
    ) -> _Facts:
        """Attention and cross-entropy, of which it is known which rows they read."""
        nothing: tuple[Support, ...] = (None,) * len(rows)
        by_row, args = Use("by_row"), binding.value.args
        if name == ATTENTION[0]:
            return _Facts(rows, nothing, True, by_row)
        if name in ATTENTION:
            grad = self._operand(args[0])
            if grad.support is None:
                return _Facts(rows, nothing, True, by_row)
            asks = ((grad.rows.of, grad.support),)
            return _Facts(rows, (AT_NEEDED,) * len(rows), True, by_row, asks)
        if not reads_packable:
            return _Facts(rows, nothing)
        is_mean = binding.value.attrs["reduction"] != "none"
        logits, target = args[:2] if name == LOSS[0] else args[1:3]
        of, counts = self._grid.rows(logits.ty).of, self._counts(binding, target)
        if is_mean and counts is None:
            reason = "the labels are not plain parts of the batch"
            if self._grid.rows(logits.ty).layout == "both":
                reason = "its classes are the positions: a softmax over all of them"
            return _Facts(rows, nothing, use=Use("any", reason=reason))
        if name == LOSS[0]:
            asks = ((of, counts),) if is_mean else ()
            return _Facts(rows, (None if is_mean else counts, None, None), True, by_row, asks)
        if rows[0].layout != "merged":
            return _Facts(rows, nothing, True, by_row)
        support = counts if is_mean else in_all([counts, self._operand(args[0]).support])
        return _Facts(rows, (support,), True, by_row)

    def _counts(self, binding: Any, target: Any) -> Support:
        """Where a label counts."""
        label = self._elements.value(target, [ROW])
        if not is_readable(label):
            return None
        ignored = int(binding.value.attrs["ignore_index"])
        return self._in_whole(frozenset({simplify(("ne", label, ignored))}), target)

    def _small(self, var: Any, bound: tuple[Any, list[Operand]] | None) -> _Facts:
        """What is computed for all rows whatever is left out: labels, masks, weights."""
        rows = self._grid.rows(var.ty)
        facts = _Facts((rows,), (None,))
        if not rows.has_rows:
            return facts
        indices: list[Value] = [("index", f"axis {k}") for k in range(len(var.ty.shape.values))]
        if (rows.layout, rows.batch) == ("both", 0):
            indices[rows.batch], indices[rows.length] = BATCH, LENGTH
        elif rows.layout == "merged" and len(indices) == 1:
            indices = [ROW]
        value = self._elements.value(var, indices)
        facts.support = (self._in_whole(support_of(value), var),)
        if facts.support == (None,) and bound is not None:
            use = describe(*bound, self._grid, self._module)
            if use.effect == "by_row" and len(use.support) == 1:
                facts.support = use.support
        return facts

    def _in_whole(self, support: Support, var: Any) -> Support:
        """Write conditions on the rows of a tensor, maybe of a cut, as those on its length."""
        if support is None:
            return None
        if any(mentions_others(condition, (BATCH, LENGTH)) for condition in support):
            return None
        cut = self._grid.cut(self._grid.rows(var.ty).of)
        if cut is None:
            return support
        extent, start = cut
        place = simplify(("sub", LENGTH, start))
        inside = [("ge", LENGTH, start), ("lt", place, size_of(extent))]
        return frozenset(
            simplify(("and", *map(simplify, inside), replaced(each, LENGTH, place)))
            for each in support
        )

    def _operand(self, expr: Any) -> Any:
        bound = self._definitions.get(expr, expr) if isinstance(expr, relax.Var) else expr
        if isinstance(bound, tvm.ir.GenericConst):
            return Operand(expr.ty, NO_ROWS, None, constant_of(bound))
        facts = self._facts[expr]
        if not isinstance(expr.ty, relax.TensorType):
            return None
        rows = facts.rows[0]
        support = AT_NEEDED if rows.has_rows and rows.of in self._all else facts.support[0]
        return Operand(expr.ty, rows, support)

    def _is_packable(self, expr: Any) -> bool:
        return isinstance(expr, relax.Var) and self._facts[expr].is_packable

    def _is_tracked(self, expr: Any) -> bool:
        """Whether something is known of the elements of a tensor that is computed whole."""
        partial = self._facts[expr].partial if isinstance(expr, relax.Var) else None
        return partial is not None and bool(partial.tracked)

    def _is_of_rows(self, expr: Any) -> bool:
        """Whether the rows of a tensor that are needed are those of the padded batch."""
        if not self._is_tracked(expr):
            return True
        facts = self._facts[expr]
        known = facts.partial
        return known is not None and (known.is_exact or known.fits_rows(facts.rows[0]))

    # -- who needs what -----------------------------------------------------------------------

    def _demand(self) -> tuple[set[Any], set[Any], list[list[Value]]]:
        """Go from the results back to what they need, packed, whole or both, and to the rows."""
        packed: set[Any] = set()
        whole: set[Any] = set()
        partial: set[Any] = set()  # whole, but for elements that an island lacks
        self._islands: set[Any] = set()
        counted: list[set[Value]] = [set() for _ in self._grid.lengths]
        results = set(_leaves(self._function.body.body))
        whole.update(results)

        def want(part: Any) -> None:
            """Need what is enough for packed rows, and for an island."""
            facts = self._facts[part]
            wanted = packed if facts.is_packable else whole if facts.partial is None else partial
            wanted.add(part)

        for binding in reversed(self._bindings):
            var, facts = binding.var, self._facts[binding.var]
            parts = [part for part in parts_of(binding.value) if isinstance(part, relax.Var)]
            is_exact = facts.partial is not None and facts.partial.is_exact
            is_island = var in partial if var not in whole else is_exact
            if var in whole and facts.laid is not None and var not in results:
                of, support = facts.laid
                counted[self._grid.whole_of(of)] |= (support or frozenset()) - {NEEDED}
                if not is_exact:  # its own rows are laid out
                    whole.remove(var)
                    packed.add(var)
            if var in whole or var in partial or var in packed:
                for of, support in facts.asks:
                    counted[self._grid.whole_of(of)] |= (support or frozenset()) - {NEEDED}
            if is_island:
                self._islands.add(var)
                for part in parts:
                    want(part)
            elif var in whole:
                for part in parts:
                    known = self._facts[part]
                    if self._is_sum(var) and (known.is_packable or known.partial is not None):
                        want(part)
                        continue
                    if known.is_packable and known.laid is None and facts.use is not None:
                        if facts.use.effect in ("any", "island"):
                            self._note(binding, facts.use.reason)
                    whole.add(part)
            elif var in packed:
                for part in parts:
                    want(part)
        self._reasons.reverse()
        whole |= partial
        return packed, whole, [sorted(each, key=repr) for each in counted]

    def _is_sum(self, var: Any) -> bool:
        use = self._facts[var].use
        return use is not None and use.effect == "sum"

    def _why(self) -> tuple[Whole, ...]:
        return tuple(dict.fromkeys(self._reasons))  # layers say the same

    def _note(self, binding: Any, reason: str) -> None:
        self._reasons.append(whole_at(binding, reason))


def whole_at(binding: Any, reason: str) -> Whole:
    """Say why a binding, or the function where it is None, needs all rows."""
    span = None if binding is None else getattr(binding.value, "span", None) or binding.span
    line = "" if span is None else f"{span.source_name.name}:{span.line}"
    what = "" if binding is None else str(operator_of(binding.value) or binding.var.name)
    return Whole(line, what.removeprefix("relax."), reason)


def _has_payload(kind: Any, rows: Rows) -> bool:
    """Whether a float tensor has more than one number for each row."""
    if not registry.dtype_name(kind).startswith(("float", "bfloat")):
        return False
    others = [n for axis, n in enumerate(kind.shape.values) if axis not in rows.axes]
    return any(not (isinstance(n, tirx.IntImm) and int(n) == 1) for n in others)
