"""Leave the padding of a batch out of a step: compute the rows that can reach its results, no more.

A row is one position of one sequence.  The analysis (:mod:`relax_disc.analysis.padding.demand`)
says which rows are needed, and which tensors can do without the others.  Those tensors become a
batch of one sequence, all rows that are needed one after the other: ``[batch, .., length, ..]``
becomes ``[1, .., tokens, ..]`` and ``[batch * length, ..]`` becomes ``[tokens, ..]``.  So whatever
goes row by row stays the operator, or the kernel, that it is; attention is told where sequences
start.  A function that is rewritten takes two more parameters for each length that its sequences
have, which say where rows come from:

- ``places [3, tokens]`` int64: for each row that is kept its row in ``[batch * length]``, its
  sequence and its position, in this order;
- ``starts [batch + 1]`` int64: the first of each sequence, then the end of the last.

What lies behind ``starts[batch]`` fills up: it repeats a row and counts nowhere, because its label
is ignored, or what is zero in all rows that are left out is zero there; so ``tokens`` may be
rounded up, and plans are used again.

Limits: a CPU or a CUDA device, whose libraries have attention over packed rows; see the analysis
for what is recognised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax.utils import gen_call_tir_inputs
from tvm.sym.analyzer import Analyzer

from relax_disc.analysis.kernels.element import substitute
from relax_disc.analysis.kernels.stages import is_buffer
from relax_disc.analysis.padding.demand import Padding, Whole, find_padding, parts_of, whole_at
from relax_disc.analysis.padding.grid import Grid, Rows
from relax_disc.analysis.padding.moves import Move
from relax_disc.analysis.padding.needed import ATTENTION, LOSS
from relax_disc.analysis.padding.operators import has_zero, reads_zero
from relax_disc.analysis.program.reader import bindings_of
from relax_disc.ops import registry
from relax_disc.ops.attention import optional_operands
from relax_disc.transform.functions import (
    at_span,
    copy_module,
    program_functions,
    result_types,
    size_meanings,
    size_misfit,
    substitute_sizes,
)
from relax_disc.transform.padding import island_rows, picks
from relax_disc.transform.padding.joined import of_one_sequence, of_packed_rows
from relax_disc.transform.padding.zeros_behind import zeros_behind
from relax_disc.transform.simplify.canonicalize_extents import with_simple_extents

_OPAQUE = 8  # of FuseOps: to be fused with nothing
TOKENS, PLACES, STARTS = "tokens", "places", "starts"
MISFIT = "a kernel of the rows that are needed would not fit them"
"""So starts the reason where padding is kept though the proof holds, which is a fault of ours."""


class _Misfit(Exception):
    def __init__(self, whole: Whole) -> None:
        super().__init__(whole.reason)
        self.whole = whole


@tvm.transform.module_pass(opt_level=0, name="RemovePadding")
class RemovePadding:
    """Leave rows out that cannot reach the results; see the module."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite the functions whose padding can be left out."""
        del ctx
        target = tvm.target.Target.current(allow_none=True)
        return remove_padding(mod, "llvm" if target is None else target.kind.name)[0]


def remove_padding(
    mod: tvm.IRModule, kind: str = "llvm"
) -> tuple[tvm.IRModule, dict[str, Padding]]:
    """Rewrite a module; say of each of its functions what was found out about its padding.

    ``kind``: of the target, "llvm" or "cuda"; others have no kernels for packed rows.
    """
    result, found = copy_module(mod), {}
    for variable, function in program_functions(mod):
        function = zeros_behind(function)
        padding = found[variable.name_hint] = find_padding(function, mod, kind)
        if padding.needed is not None:
            draft = copy_module(result)
            try:
                _Rewriter(draft, function, padding, kind).run(variable)
                result = draft
            except _Misfit as misfit:
                reasons = (*padding.reasons, misfit.whole)
                found[variable.name_hint] = Padding(padding.grid, reasons=reasons)
    return relax.transform.Normalize()(result), found


@dataclass(frozen=True)
class _Packing:
    """Where the packed rows of one length come from."""

    tokens: tirx.Var  # how many there are
    places: relax.Var
    starts: relax.Var


class _Rewriter:
    """Writes one function anew."""

    def __init__(
        self, mod: tvm.IRModule, function: relax.Function, padding: Padding, kind: str
    ) -> None:
        assert padding.grid is not None
        self._library = "relax_disc.cuda" if kind == "cuda" else "relax_disc.cpu"
        self._module, self._function, self._padding = mod, function, padding
        self._grid: Grid = padding.grid
        self._packings = self._parameters()
        self._packed: dict[Any, Any] = {}
        self._gathered: dict[tuple[Any, bool], Any] = {}
        self._spread: dict[tuple[Any, Rows], Any] = {}
        self._targets: dict[tuple[Any, int], Any] = {}
        self._cuts: dict[int, Any] = {}
        self._numbers: dict[int, Any] = {}
        self._laid: dict[Any, Any] = {}
        self._kernels: dict[Any, tvm.ir.GlobalVar] = {}
        self._values: dict[Any, Any] = {}  # whole tensors by what they are bound to
        self._firsts: dict[Any, Any] = {}  # for each the first that is equal
        self._builder = relax.BlockBuilder()
        self._bindings: list[Any] = []
        self._binding: Any = None

    def run(self, variable: tvm.ir.GlobalVar) -> None:
        """Put the new function into the module."""
        function = self._function
        (block,) = function.body.blocks
        for self._binding in bindings_of(function):
            self._write()
        body = relax.SeqExpr([type(block)(self._bindings, block.span)], function.body.body)
        attrs = self._attributes()
        self._module.update_func(
            variable,
            relax.Function(
                [*function.params, *(x for p in self._packings for x in (p.places, p.starts))],
                body,
                function.ret_ty,
                function.is_pure,
                attrs=tvm.ir.make_node("ir.DictAttrs", **attrs),
                span=function.span,
            ),
        )

    def _parameters(self) -> list[_Packing]:
        """Make the parameters to come, for each length of the sequences."""
        batch, lengths = self._grid.batch, self._grid.lengths
        names = {param.name for param in self._function.params}
        names |= {self._grid.sequences.name, *(length.name for length in lengths)}
        packings = []
        for length in lengths:
            prefix = f"{length.name}_" if len(lengths) > 1 else ""
            tokens = tirx.Var(_free(prefix + TOKENS, names), "int64")
            places, starts = relax.TensorType([3, tokens], "int64"), [batch + 1]
            packings.append(
                _Packing(
                    tokens,
                    relax.Var(_free(prefix + PLACES, names), places),
                    relax.Var(_free(prefix + STARTS, names), relax.TensorType(starts, "int64")),
                )
            )
        return packings

    def _packing(self, of: int) -> _Packing:
        """Where rows of a length, or of a cut of it, come from."""
        return self._packings[self._grid.whole_of(of)]

    def _extent(self, of: int) -> Any:
        cut = self._grid.cut(of)
        return self._grid.lengths[of] if cut is None else cut[0]

    def _attributes(self) -> dict[str, Any]:
        attrs = dict(self._function.attrs or {})
        dims = {str(k): [int(x) for x in v] for k, v in attrs.get("relax_disc.dims", {}).items()}
        kinds = attrs.get("relax_disc.param_kinds")
        if kinds is not None:
            more = ["packing"] * 2 * len(self._packings)
            attrs["relax_disc.param_kinds"] = [*map(str, kinds), *more]
        for packing, length in zip(self._packings, self._grid.lengths, strict=True):
            upper, name = most_tokens(dims, self._grid, length), packing.tokens.name
            if dims:
                dims[name] = [1, -1 if upper is None else upper, 1]
                attrs["relax_disc.dims"] = dims
            for bound, value in (("lower", 1), ("upper", upper)):
                known = attrs.get(f"tir_var_{bound}_bound")
                if known is not None and value is not None:
                    bounds = {str(k): int(v) for k, v in known.items()}
                    attrs[f"tir_var_{bound}_bound"] = {**bounds, name: value}
        return attrs

    # -- bindings -----------------------------------------------------------------------------

    def _write(self) -> None:
        """Write the binding at hand: as it was, over packed rows, or both."""
        var, value = self._binding.var, self._binding.value
        if var in self._padding.whole:
            if isinstance(value, relax.Call):
                # Layers slice the same table of angles; its rows are taken once.
                self._firsts[var] = self._values.setdefault(tvm_ffi.StructuralKey(value), var)
            if var in self._padding.sums and not self._is_element_of_whole(value):
                value = self._builder.normalize(self._over_packed(value, var.ty))
            elif any(part in self._packed for part in parts_of(value)):
                value = self._builder.normalize(self._over_laid_out(value))
            self._bindings.append(relax.VarBinding(var, value, self._binding.span))
        elif var in self._padding.packed:
            if self._is_element_of_whole(value):
                self._bindings.append(self._binding)
            else:
                self._packed[var] = self._emit(self._over_packed(value, var.ty), var.name)

    def _is_element_of_whole(self, value: Any) -> bool:
        return isinstance(value, relax.TupleGetItem) and value.tuple_value not in self._packed

    def _emit(self, expr: Any, name: str) -> Any:
        expr = self._builder.normalize(self._located(expr))
        var = relax.DataflowVar(name, expr.ty, self._binding.var.span)
        self._bindings.append(relax.VarBinding(var, expr, self._binding.span))
        return var

    def _located(self, expr: Any) -> Any:
        span = getattr(self._binding.value, "span", None) or self._binding.span
        return at_span(expr, span) if isinstance(expr, relax.Call) else expr

    def _over_packed(self, value: Any, kind: Any) -> Any:
        """Write an operation over packed operands; ``kind`` is the type of its whole result."""
        if isinstance(value, relax.TupleGetItem):
            return relax.TupleGetItem(self._packed[value.tuple_value], value.index)
        if not isinstance(value, relax.Call):
            return self._operand(value)
        name, move = value.op.name, self._padding.moves.get(self._binding.var)
        if move is not None:
            return self._moved(move, value, kind)
        if name in ATTENTION:
            return self._attention(value)
        if name in LOSS:
            return self._loss(value, 2 if name == LOSS[1] else 1)
        if name == "relax.call_tir":
            return self._kernel(value)
        args = [self._aligned(arg, kind, reads_zero(name, k)) for k, arg in enumerate(value.args)]
        if name == "relax.mean" and self._binding.var in self._padding.sums:
            return self._mean(value, args[0], kind)
        if name == "relax.sum" and (layout := self._grid.rows(kind).layout) in ("length", "batch"):
            return self._added_up(args[0], kind, self._grid.rows(value.args[0].ty).of, layout)
        if name in ("relax.reshape", "relax.broadcast_to"):
            args[1] = relax.ShapeExpr(self._shape(kind))
        return self._located(relax.Call(value.op, args, value.attrs, value.ty_args))

    def _added_up(self, rows: Any, kind: relax.TensorType, of: int, by: str) -> relax.Call:
        """Add up the rows ``[1, tokens, ..]`` by their positions, or by their sequences."""
        packing, grid = self._packing(of), self._grid
        index, extent = (2, self._extent(of)) if by == "length" else (1, grid.batch)
        width = math.prod(rows.ty.shape.values[2:], start=tirx.IntImm("int64", 1))
        matrix = self._emit(relax.op.reshape(rows, [packing.tokens, width]), "rows")
        numbers = self._call_te(
            lambda places: te.compute((places.shape[1],), lambda row: places(index, row)),
            *("kept_numbers", packing.places),
        )
        sums = relax.call_dps_packed(
            f"{self._library}.embedding_backward",
            [matrix, numbers, relax.prim_value(-1)],
            relax.TensorType([extent, width], kind.dtype),
        )
        return self._located(relax.op.reshape(self._emit(sums, f"by_{by}"), kind.shape))

    def _mean(self, call: relax.Call, rows: Any, kind: relax.TensorType) -> relax.Call:
        """Divide the mean over rows that are kept anew, by the number of all."""
        of = self._grid.rows(call.args[0].ty).of
        mean = self._emit(relax.Call(call.op, [rows], call.attrs, call.ty_args), "kept_mean")
        sizes = (self._packing(of).tokens, self._grid.batch, self._extent(of))

        def anew(mean: te.Tensor, tokens: Any, batch: Any, length: Any) -> te.Tensor:
            share = tokens.astype(mean.dtype) / (batch * length).astype(mean.dtype)
            return te.compute(mean.shape, lambda *i: mean(*i) * share, name="mean")

        return self._alone(anew, "mean_of_all", mean, *map(relax.prim_value, sizes))

    def _moved(self, move: Move, call: relax.Call, kind: relax.TensorType) -> Any:
        """Take a part of the positions of rows, or put one back.

        A cut of packed rows is all of them: labels and masks tell which are part of it, and a
        gradient is zero in the others.
        """
        expr = call.args[1].fields[0]
        if move.kind in ("cut", "pad"):
            return self._operand(expr)
        rows = self._grid.rows(expr.ty if move.kind == "pick" else kind)
        packing, length = self._packing(rows.of), self._extent(rows.of)
        keeps_axis = len(expr.ty.shape.values) == len(kind.shape.values)
        given: list[Any] = [] if isinstance(move.start, int) else [relax.prim_value(length)]
        given += [] if move.at == -1 else [call.args[1].fields[move.at]]
        where = [packing.places, packing.starts, *given]
        if move.kind == "spread":
            spread = picks.spread(move, length, keeps_axis)
            return (self._alone if given else self._written)(spread, "spread", expr, *where)
        row = packing.starts  # the first row of each sequence, where that is wanted
        if move.start != 0:
            row = self._call_alone(picks.rows_of(move, length), "picked_rows", *where)
        picked, shape = picks.picked(move.axis, keeps_axis), relax.ShapeExpr(kind.shape.values)
        return self._written(picked, "picked", self._operand(expr), row, shape)

    def _kernel(self, call: relax.Call) -> relax.Call:
        kinds = call.ty_args[0]
        fields = list(kinds.fields) if isinstance(kinds, relax.TupleType) else [kinds]
        types = [relax.TensorType(self._shape(kind), kind.dtype) for kind in fields]
        operands = [
            self._operand(arg, has_zero(arg.ty))
            if isinstance(arg.ty, relax.TensorType)
            else self._size(arg)
            for arg in call.args[1].fields
        ]
        kernel, operands = self._of_one(call, operands)
        out = types if isinstance(kinds, relax.TupleType) else types[0]
        result = self._located(relax.call_tir(kernel, relax.Tuple(operands), out))
        misfit = size_misfit(self._module[kernel], result)
        if misfit is not None:
            raise _Misfit(whole_at(self._binding, f"{MISFIT}: {misfit}"))
        return result

    def _of_one(self, call: relax.Call, operands: list[Any]) -> tuple[tvm.ir.GlobalVar, list[Any]]:
        """Return a kernel for a batch of one, and its operands: FuseTIR wants equal extents."""
        kernel = before = self._module[call.args[0]]
        ones = {
            size: tirx.IntImm("int64", 1)
            for size, known in size_meanings(kernel, call).items()
            if self._grid.rows_of_shape([known]).layout == "batch"
        }
        pairs = list(zip(call.args[1].fields, operands, strict=True))
        kernel, pairs = self._of_cut(*self._of_joined(kernel, pairs), result_types(call))
        kernel, pairs = of_packed_rows(kernel, pairs, [each.tokens for each in self._packings])
        if ones and all(map(is_buffer, kernel.params)):
            kernel = substitute_sizes(kernel, ones)
        operands = [operand for _, operand in pairs]
        if kernel.same_as(before):
            return call.args[0], operands
        return self._add_kernel(kernel, call.args[0].name_hint), operands

    def _of_joined(
        self, kernel: tirx.PrimFunc, pairs: list[tuple[Any, Any]]
    ) -> tuple[tirx.PrimFunc, list[tuple[Any, Any]]]:
        """Let a kernel of joined batches that is given a part of the sequences have one sequence.

        ``pairs``: arguments and operands. The number is in the extents of rows alone, always times
        the number of batches.
        """
        for k, (arg, _) in enumerate(pairs):
            if self._grid.times > 1 and arg.same_as(self._grid.sequences):
                kernel = of_one_sequence(kernel, kernel.params[k], self._grid.times)
                kernel = kernel.specialize({kernel.params[k]: tirx.IntImm("int64", 1)})
                return kernel, [*pairs[:k], *pairs[k + 1 :]]
        return kernel, pairs

    def _of_cut(
        self,
        kernel: tirx.PrimFunc,
        pairs: list[tuple[Any, Any]],
        results: list[relax.TensorType],
    ) -> tuple[tirx.PrimFunc, list[tuple[Any, Any]]]:
        """Let a kernel of cut rows that is given the whole length read the rows from its buffers.

        Its extents are ``length - 1``, and of packed rows there are as many as it was given.
        """
        given = [*(arg.ty for arg, _ in pairs), *results]
        for of in {rows.of for rows in map(self._grid.rows, given) if rows.has_rows}:
            length = self._grid.lengths[self._grid.whole_of(of)]
            left_out = Analyzer().simplify(length - self._extent(of))
            for k, (arg, _) in enumerate(pairs):
                if arg.same_as(length) and isinstance(left_out, tirx.IntImm) and int(left_out):
                    kept = tirx.Var(f"{length.name}_kept", "int64")
                    kernel = kernel.specialize({kernel.params[k]: kept + left_out})
                    return with_simple_extents(kernel), [*pairs[:k], *pairs[k + 1 :]]
        return kernel, pairs

    def _attention(self, call: relax.Call) -> relax.Call:
        count = 3 if call.op.name == ATTENTION[0] else 6
        operands = [self._operand(arg) for arg in call.args[:count]]
        # A mask stays that of the padded batch, and is read at the places of rows.
        mask, rng = optional_operands(call, count)
        first = 0 if count == 3 else 1
        kinds = [self._grid.rows(arg.ty).of for arg in call.args[first : first + 2]]
        packings = [self._packing(of) for of in kinds]
        lengths = [relax.prim_value(self._grid.lengths[of]) for of in kinds]
        where = [x for packing in packings for x in (packing.starts, packing.places)]
        name = call.op.name.replace("attention", "packed_attention")
        args = [*operands, *where, *mask, *rng, *lengths]
        return self._located(registry.call(name, args, dict(call.attrs.items())))

    def _loss(self, call: relax.Call, target: int) -> relax.Call:
        ignored, of = int(call.attrs["ignore_index"]), self._grid.rows(call.args[target].ty).of
        args = [
            self._target(arg, ignored, of) if k == target else self._operand(arg)
            for k, arg in enumerate(call.args)
        ]
        return self._located(relax.Call(call.op, args, call.attrs, call.ty_args))

    # -- operands -----------------------------------------------------------------------------

    def _operand(self, expr: Any, is_filled: bool = True) -> Any:
        """Return the packed form of what an operation reads; what has no rows is as it is.

        ``is_filled``: whether rows that fill up are zero where those that are left out are.
        """
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._operand(part) for part in expr.fields])
        if not isinstance(expr, relax.Var) or not isinstance(expr.ty, relax.TensorType):
            return expr
        rows = self._grid.rows(expr.ty)
        if rows.layout == "none":
            return expr
        if expr in self._packed:
            return self._packed[expr]
        expr = self._firsts.get(expr, expr)
        key = expr, is_filled and expr in self._padding.zeros
        if key not in self._gathered:
            self._gathered[key] = self._gather(expr, rows, is_filled=key[1])
        return self._gathered[key]

    def _over_laid_out(self, value: Any) -> Any:
        """Write an operation over whole tensors, some of which are packed rows laid out."""
        if isinstance(value, relax.Call):
            args = [self._laid_out(arg) for arg in value.args]
            return self._located(relax.Call(value.op, args, value.attrs, value.ty_args))
        return self._laid_out(value)

    def _laid_out(self, expr: Any) -> Any:
        """Return a tensor whole: packed rows at their places in the batch, zeros elsewhere."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._laid_out(part) for part in expr.fields])
        if not isinstance(expr, relax.Var) or expr not in self._packed:
            return expr
        if expr not in self._laid:
            rows = self._grid.rows(expr.ty)
            if rows.of not in self._numbers:
                packing, length = self._packing(rows.of), self._grid.lengths[rows.of]
                shape = relax.ShapeExpr([self._grid.batch, length])
                made = (island_rows.numbers, "row_numbers", packing.places, packing.starts, shape)
                self._numbers[rows.of] = self._call_alone(*made)
            made = island_rows.laid_out(rows), "laid_out", self._packed[expr]
            shape = relax.ShapeExpr(expr.ty.shape.values)
            self._laid[expr] = self._call_te(*made, self._numbers[rows.of], shape)
        return self._laid[expr]

    def _aligned(self, expr: Any, kind: relax.TensorType, is_filled: bool) -> Any:
        """Return a packed operand; what there is one of for each sequence becomes one for each row.

        Such an operand has an axis of one where the result of type ``kind`` has the positions.
        """
        is_tensor = isinstance(expr, relax.Var) and isinstance(expr.ty, relax.TensorType)
        if not is_tensor or self._grid.rows(expr.ty).layout != "batch":
            return self._operand(expr, is_filled)
        shift = len(kind.shape.values) - len(expr.ty.shape.values)
        wanted = self._grid.rows(kind)
        rows = Rows("both", self._grid.rows(expr.ty).batch, wanted.length - shift, wanted.of)
        if (expr, rows) not in self._spread:
            self._spread[expr, rows] = self._gather(expr, rows, {rows.batch: 1})
        return self._spread[expr, rows]

    def _gather(
        self, expr: Any, rows: Rows, found_at: dict[int, int] | None = None, is_filled: bool = False
    ) -> Any:
        """Take the rows that are kept from a whole tensor.

        ``found_at``: axes of the tensor, and which row of ``places`` has the index there.
        """
        places = (
            found_at
            or {
                "merged": {rows.length: 0},
                "both": {rows.batch: 1, rows.length: 2},
                "length": {rows.length: 2},
            }[rows.layout]
        )
        token_axis, (where, is_there) = rows.length, self._where(rows.of)
        # Of a cut without positions there is no other row to fill up with.
        is_filled = is_filled or (found_at is None and self._may_be_empty(rows.of))

        def rows_of(x: te.Tensor, *where: te.Tensor) -> te.Tensor:
            def element(*indices: Any) -> Any:
                found, row = list(indices), indices[token_axis]
                if found_at is not None:
                    found[token_axis] = 0
                for axis, place in places.items():
                    found[axis] = where[0](place, row)
                if not is_filled:
                    return x(*found)
                zero = tirx.const(0, x.dtype)
                return tirx.if_then_else(is_there(row, *where), x(*found), zero)

            shape: list[Any] = list(x.shape)
            shape[rows.batch if rows.layout == "both" else token_axis] = 1
            shape[token_axis] = where[0].shape[1]
            return te.compute(shape, element, name="kept_rows")

        return self._call_te(rows_of, "kept_rows", expr, *(where if is_filled else where[:1]))

    def _may_be_empty(self, of: int) -> bool:
        """Whether it is a cut that has no positions at some size in range."""
        cut = self._grid.cut(of)
        if cut is None:
            return False
        length = self._grid.lengths[self._grid.whole_of(of)]
        dims = (self._function.attrs or {}).get("relax_disc.dims", {})
        least = int(dims[length.name][0]) if length.name in dims else 1
        extent = Analyzer().simplify(substitute(cut[0], {length: tirx.IntImm("int64", least)}))
        return not isinstance(extent, tirx.IntImm) or int(extent) < 1

    def _target(self, expr: Any, ignored: int, of: int) -> Any:
        """Take the labels of the rows that are kept; those that fill up are ignored."""
        key = expr, ignored
        if key not in self._targets:
            where, is_there = self._where(of)

            def labels_of(x: te.Tensor, *where: te.Tensor) -> te.Tensor:
                def element(row: Any) -> Any:
                    label, other = x(where[0](0, row)), tirx.const(ignored, x.dtype)
                    return tirx.if_then_else(is_there(row, *where), label, other)

                return te.compute((where[0].shape[1],), element, name="kept_labels")

            self._targets[key] = self._call_te(labels_of, "kept_labels", expr, *where)
        return self._targets[key]

    def _where(self, of: int) -> tuple[list[Any], Callable[..., Any]]:
        """Return the tensors that say where rows come from, and what says that one is a row.

        Others fill up, or are no part of a cut: these say where any other row comes from.
        """
        packing, cut = self._packing(of), self._grid.cut(of)
        if cut is None:
            return [packing.places, packing.starts], _is_before_end
        if of not in self._cuts:
            extent, start = cut

            def places_of(places: te.Tensor, starts: te.Tensor, extent: Any) -> te.Tensor:
                def element(k: Any, row: Any) -> Any:
                    position = places(2, row) - start
                    is_part = tirx.all(
                        _is_before_end(row, places, starts), position >= 0, position < extent
                    )
                    position = tirx.max(tirx.min(position, extent - 1), 0)
                    sequence = places(1, row)
                    rest = tirx.Select(k == 2, position, is_part.astype("int64"))
                    rest = tirx.Select(k == 1, sequence, rest)
                    return tirx.Select(k == 0, sequence * extent + position, rest)

                return te.compute((4, places.shape[1]), element, name="cut_places")

            made = (places_of, "cut_places", packing.places, packing.starts)
            self._cuts[of] = self._call_alone(*made, relax.prim_value(extent))
        return [self._cuts[of]], lambda row, places: places(3, row) > 0

    def _call_te(self, compute: Any, name: str, *args: Any) -> Any:
        return self._emit(self._written(compute, name, *args), name)

    def _call_alone(self, compute: Any, name: str, *args: Any) -> Any:
        return self._emit(self._alone(compute, name, *args), name)

    def _alone(self, compute: Any, name: str, *args: Any) -> relax.Call:
        """Call a kernel with numbers among its arguments, which stays alone (`Emitter.te`)."""
        return self._written(compute, name, *args, primfunc_attrs={"op_pattern": _OPAQUE})

    def _written(self, compute: Any, name: str, *args: Any, **options: Any) -> relax.Call:
        """Call a kernel that is written in TE."""
        kernel, operands, out = gen_call_tir_inputs(compute, *args, **options)
        return self._located(relax.call_tir(self._add_kernel(kernel, name), operands, out))

    def _add_kernel(self, kernel: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        """Add a kernel to the module, unless an equal one is there."""
        key = tvm_ffi.StructuralKey(kernel)
        if key not in self._kernels:
            taken = {known.name_hint for known in self._module.functions}
            where = tvm.ir.GlobalVar(_free(name, taken))
            relax.expr._update_type(where, kernel.ty)
            self._module.update_func(where, kernel)
            self._kernels[key] = where
        return self._kernels[key]

    # -- sizes --------------------------------------------------------------------------------

    def _shape(self, kind: relax.TensorType) -> list[Any]:
        """Shape of a tensor over packed rows."""
        shape: list[Any] = list(kind.shape.values)
        rows = self._grid.rows(kind)
        if rows.layout == "none":
            return shape
        if rows.layout == "both":
            shape[rows.batch] = tirx.IntImm("int64", 1)
        shape[rows.length] = self._packing(rows.of).tokens
        return shape

    def _size(self, size: Any) -> Any:
        """A size that a kernel is given: with one sequence of all rows that are kept."""
        rows = self._grid.rows_of_shape([size])
        if rows.layout in ("length", "merged"):
            return self._packing(rows.of).tokens
        one = tirx.IntImm("int64", 1)
        changes: dict[tirx.Var, Any] = {self._grid.sequences: one} if self._grid.times == 1 else {}
        for length, packing in zip(self._grid.lengths, self._packings, strict=True):
            changes[length] = packing.tokens
        return substitute(size, changes)


def _is_before_end(row: Any, places: te.Tensor, starts: te.Tensor) -> Any:
    del places
    return row < starts(starts.shape[0] - 1)


def most_tokens(dims: dict[str, list[int]], grid: Grid, length: tirx.Var) -> int | None:
    """Return the most rows there can be in declared ranges; None: there is no bound."""
    bounds = [dims.get(dim.name, [1, -1])[1] for dim in (grid.sequences, length)]
    return None if -1 in bounds else grid.times * bounds[0] * bounds[1]


def _free(name: str, taken: Sequence[str] | set[str]) -> str:
    count, free = 0, name
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    return free
