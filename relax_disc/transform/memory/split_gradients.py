"""Make and use the largest gradients by rows, in a second function for small budgets.

The gradient of a vocabulary head's weight, or of an embedding table, is as large as the table, and
nothing but the update of its own row reads an element of it.  Where such gradients are, a function
`main` gets a second one, `main__by_rows`, with the same parameters and results, bit for bit, in
which each exists in parts of whole rows: a part is made, and updates its rows of the parameter and
of the optimizer's state, which are views of them.  What is made once more for it is the logits (the
rows' log-sum-exp is kept), a fourth product beside the head's three.  So the run time uses it where
the plan of `main` does not fit.  Of a tied table rows of both gradients are made and added up.

A gradient stays whole if something else than kernels that go row by row reads it (an optimizer with
norms of whole parameters, a gradient that is kept), if it is not made in float32, or if it is
small.  Why it does is told by the attribute ``relax_disc.whole_gradients`` of `main`, for each such
head and table, and whatever makes it for one or two parameters that are more than twice as large as
all others: the parameter, how many parameters of the function come before it, and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx, topi
from tvm.ir import prim
from tvm.relax.utils import copy_with_new_vars

from relax_disc.analysis.kernels.stages import constant, is_buffer, loads_of, read_stages
from relax_disc.analysis.program.reader import bindings_of, inplace_pairs
from relax_disc.analysis.program.table import NotPlannableError
from relax_disc.ops import embedding, join_rows, registry, rows, vocabulary_head
from relax_disc.ops.operand_views import Uses, is_call_of, operands_of
from relax_disc.transform.functions import (
    at_span,
    block_like,
    copy_module,
    program_functions,
    result_types,
    with_blocks,
)

PARTS, LEAST_BYTES = 8, 1 << 20
WHOLE_GRADIENTS = "relax_disc.whole_gradients"
_HEAD = "relax_disc.cpu.vocabulary_head"


def by_rows_name(function: str) -> str:
    """Name of the generated function that makes the largest gradients of a function by rows."""
    return f"{function}__by_rows"


@tvm.transform.module_pass(opt_level=0, name="SplitGradients")
class SplitGradients:
    """Add a function with gradients by rows beside each that has such; before kernels are final."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the added functions."""
        del ctx
        builder = relax.BlockBuilder(mod)
        for variable, function in program_functions(mod):
            try:
                splitter = _Splitter(mod, builder, copy_with_new_vars(function))
            except NotPlannableError:  # control flow: nothing is planned
                continue
            made = splitter.run()
            if whole := splitter.whole():
                builder.update_func(variable, function.with_attr(WHOLE_GRADIENTS, whole))
            if made is not None:
                name = by_rows_name(variable.name_hint)
                builder.add_func(made.with_attr("global_symbol", name), name)
        return copy_module(mod, dict(builder.get().functions_items()))


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A gradient of which parts can be made."""

    variable: relax.Var
    count: int  # its rows
    maker: relax.Var
    part: Callable[[int, int], relax.Var]  # binds rows of it: the first, how many
    begin: Callable[[], None] = lambda: None  # binds what comes in the place of its maker
    addend: relax.Var | None = None  # another gradient, of which it is the sum with one of its own


@dataclass(frozen=True, slots=True)
class _Reader:
    """A kernel that reads a gradient row by row, and parameters of the function alone."""

    call: relax.Call
    gradients: tuple[relax.Var, ...]  # of one number of rows
    elements: tuple[relax.Var, ...]  # its results
    # of each result the parameter of the function that it replaces; None: rows of sums
    replaced: tuple[relax.Var | None, ...]


class _Splitter:
    def __init__(
        self, mod: tvm.IRModule, builder: relax.BlockBuilder, function: relax.Function
    ) -> None:
        self._mod, self._builder, self._function = mod, builder, function
        bindings_of(function)
        self._uses = Uses.of(function)
        self._parameters = set(function.params)
        self._replaced = self._results()
        self._kernels: dict[Any, Any] = {}
        self._bindings: list[relax.Binding] = []
        self._renamed: dict[relax.Expr, relax.Var] = {}
        self._refused: dict[relax.Var, str] = {}  # why gradients are not made by rows
        found = (self._gradient(each, value) for each, value in self._uses.definitions.items())
        self._gradients = {each.variable: each for each in found if each is not None}
        while refused := {x: why for x, g in self._gradients.items() if (why := self._refusal(g))}:
            self._refused |= refused
            for variable in refused:
                del self._gradients[variable]

    def run(self) -> relax.Function | None:
        """Return the function with gradients by rows; None where there is none."""
        if not self._gradients:
            return None
        makers = {gradient.maker: gradient for gradient in self._gradients.values()}
        readers: dict[relax.Var, _Reader] = {}
        for gradient in self._gradients.values():
            for user in self._users(gradient.variable):
                reader = None if user in makers else self._reader(gradient, user)
                if user is not None and isinstance(reader, _Reader):
                    readers[user] = reader
        dropped = {x for reader in readers.values() for x in reader.elements}
        dropped |= set(self._gradients)
        blocks = []
        for block in self._function.body.blocks:
            for binding in block.bindings:
                if binding.var in makers:
                    makers[binding.var].begin()
                elif binding.var in readers:
                    self._read(readers[binding.var])
                elif binding.var not in dropped:
                    self._bindings.append(self._renewed(binding))
            blocks.append(block_like(block, self._bindings))
            self._bindings = []
        return with_blocks(self._function, blocks)

    def whole(self) -> list[tuple[str, int, str]]:
        """Parameters whose gradients stay whole, with their places and the reasons."""
        places = {param: place for place, param in enumerate(self._function.params)}
        large = [pair for pair in self._replaced.items() if 4 * _size(pair[1]) >= LEAST_BYTES]
        large.sort(key=lambda pair: places[pair[1]])
        largest = max((_size(param) for _, param in large), default=0)
        others = set()  # as large, made otherwise
        seen: set[relax.Var] = set()  # the optimizer's state goes with its parameter
        result = []
        for new, param in large:
            gradients = self._gradients_of(new)
            if not gradients or not gradients.isdisjoint(seen | set(self._gradients)):
                continue
            seen |= gradients
            reasons = sorted({self._refused[each] for each in gradients & set(self._refused)})
            if not reasons and 2 * _size(param) >= largest:
                others.add(param.name)
                reasons = sorted({self._made_whole(each) for each in gradients})
            if reasons:
                result.append((param.name, places[param], "; ".join(reasons)))
        if len(others) > 2:  # a stack of layers, none of which decides what a budget needs
            result = [entry for entry in result if entry[0] not in others]
        return result

    def _gradients_of(self, new: relax.Var) -> set[relax.Var]:
        """First values of a parameter's shape from which its new value is computed."""
        known = {*self._gradients, *self._refused}
        firsts: set[relax.Var] = set()
        definitions = self._uses.definitions
        seen, waiting = {new}, [(new, new)]
        while waiting:
            variable, through = waiting.pop()
            operands = operands_of(definitions[variable])
            found = [x for x in operands if x in definitions and x not in seen]
            seen.update(found)
            tuples = [x for x in found if isinstance(x.ty, relax.TupleType)]
            alike = [x for x in found if _extents(x) == _extents(new)]
            waiting += [(x, through) for x in tuples] + [(x, x) for x in alike if x not in known]
            firsts.update(x for x in alike if x in known)
            if not tuples and not alike and through is not new:
                firsts.add(through)
        return firsts

    def _made_whole(self, gradient: relax.Var) -> str:
        value = self._uses.definitions[gradient]
        while isinstance(value, relax.TupleGetItem):
            value = self._uses.definitions[value.tuple_value]
        kernel = value.args[0] if isinstance(value, relax.Call) and value.args else value
        name = getattr(kernel, "global_symbol", None) or getattr(kernel, "name_hint", "a kernel")
        return f"{name} makes all of it, as {registry.dtype_name(gradient.ty)}"

    def _renewed(self, binding: relax.Binding) -> relax.Binding:
        """Return the binding of an element of what was renewed as that of the new one's."""
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._renamed:
            value = relax.TupleGetItem(self._renamed[value.tuple_value], value.index)
            return relax.VarBinding(binding.var, self._builder.normalize(value), binding.span)
        return binding

    def _results(self) -> dict[relax.Var, relax.Var]:
        """Variables that are nothing but the new value of a parameter, with that."""
        result = self._function.body.body
        result = self._uses.definitions.get(result, result)
        if not isinstance(result, relax.Tuple):
            return {}
        pairs, params = inplace_pairs(self._function), self._function.params
        return {
            field: params[pairs[place]]
            for place, field in enumerate(result.fields)
            if place in pairs and isinstance(field, relax.Var) and len(self._users(field)) == 1
        }

    def _users(self, variable: relax.Var) -> list[relax.Var | None]:
        return [user for user, _ in self._uses.users_of(variable)]

    def _gradient(self, variable: relax.Var, value: relax.Expr) -> _Gradient | None:
        if not is_call_of(value, "relax.call_dps_packed"):
            return None
        name = value.args[0].global_symbol
        if name in (embedding.BACKWARD, embedding.BACKWARD_ADD):
            return self._of_table(variable, value, name == embedding.BACKWARD_ADD)
        form = name.removeprefix(_HEAD)
        if name.startswith(_HEAD) and form in vocabulary_head.FORMS:
            return self._of_head(variable, value, form)
        return None

    def _of_table(self, variable: relax.Var, call: relax.Call, adds: bool) -> _Gradient | None:
        extents = _large_extents(variable.ty)
        if extents is None:
            return None
        *fields, last = call.args[1].fields
        addend = fields.pop() if adds else None
        name = embedding.BACKWARD_ADD_ROWS if adds else embedding.BACKWARD_ROWS

        def part(begin: int, count: int) -> relax.Var:
            numbers = [last, relax.prim_value(begin), relax.prim_value(extents[0])]
            kind = relax.TensorType([count, extents[1]], "float32")
            onto = [] if addend is None else [self._gradients[addend].part(begin, count)]
            made = relax.call_dps_packed(name, [*fields, *onto, *numbers], kind)
            return self._new(at_span(made, call.span), f"{variable.name}_rows")

        return _Gradient(variable, extents[0], variable, part, addend=addend)

    def _of_head(self, variable: relax.Var, call: relax.Call, form: str) -> _Gradient | None:
        fields, kinds = list(call.args[1].fields), result_types(call)
        extents = _large_extents(kinds[-2])
        weight, target, workspace = fields[1], fields[2], kinds[-1]
        elements = self._elements(variable)
        gradient = None if elements is None else elements.get(len(kinds) - 2)
        if extents is None or gradient is None or weight not in self._parameters:
            return None
        kinds[-2] = relax.TensorType([registry.elements(registry.extents(target.ty))], "float64")
        lse: list[relax.Var] = []

        def begin_with_lse() -> None:
            made = relax.call_dps_packed(f"{_HEAD}{form}_lse", fields, kinds)
            whole = self._new(at_span(made, call.span), variable.name)
            self._renamed[variable] = whole
            lse.append(self._new(relax.TupleGetItem(whole, len(kinds) - 2), "row_lse"))

        def part(begin: int, count: int) -> relax.Var:
            numbers = [relax.prim_value(begin), relax.prim_value(extents[0])]
            named = self._new(rows(weight, begin, count), f"{weight.name}_rows")
            operands = [fields[0], named, *fields[2:-3], *lse, *fields[-3:], *numbers]
            columns = vocabulary_head.workspace_columns(count, extents[1])
            scratch = [registry.extents(workspace)[0], tirx.IntImm("int64", columns)]
            results = [
                relax.TensorType([count, extents[1]], "float32"),
                relax.TensorType(scratch, "float32"),
            ]
            made = relax.call_dps_packed(f"{_HEAD}_weight{form}", operands, results)
            both = self._new(at_span(made, call.span), f"{weight.name}_gradient")
            return self._new(relax.TupleGetItem(both, 0), f"{gradient.name}_rows")

        return _Gradient(gradient, extents[0], variable, part, begin_with_lse)

    def _elements(self, variable: relax.Var) -> dict[int, relax.Var] | None:
        """Variables of a tuple's elements, if it is used through them alone."""
        found = {}
        for user, value in self._uses.users_of(variable):
            if user is None or not isinstance(value, relax.TupleGetItem) or value.index in found:
                return None
            found[value.index] = user
        return found

    def _refusal(self, gradient: _Gradient) -> str | None:
        """Say why a gradient stays whole; None: it can go by rows."""
        added = gradient.addend
        if added is not None and added not in self._gradients:
            return self._refused.get(added) or self._made_whole(added)
        for user in self._users(gradient.variable):
            sums = [each for each in self._gradients.values() if each.variable.same_as(user)]
            if any(gradient.variable.same_as(each.addend) for each in sums):
                continue
            reader = self._reader(gradient, user)
            if isinstance(reader, str):
                return reader
        return None if self._users(gradient.variable) else "nothing reads it"

    def _reader(self, gradient: _Gradient, user: relax.Var | None) -> _Reader | str:
        """Describe a reader of a gradient, or say why it cannot go by rows."""
        call = self._uses.definitions.get(user)
        if not is_call_of(call, "relax.call_tir") or len(call.args) != 2:
            return "it is read by no kernel that goes row by row"
        kernel, kinds = self._mod[call.args[0]], result_types(call)
        if not _goes_by_rows(kernel, gradient.count):
            return f"{call.args[0].name_hint}, which reads it, does not go row by row"
        several = isinstance(call.ty_args[0], relax.TupleType)
        elements = self._elements(user) if several else {0: user}
        if elements is None or len(elements) != len(kinds):
            return f"{call.args[0].name_hint}, which reads it, has results that nothing reads"
        operands = list(call.args[1].fields)
        gradients = []
        for operand in operands:
            if constant(_first_extent(operand.ty)) == gradient.count:
                if operand in self._gradients:
                    gradients.append(operand)
                elif operand not in self._parameters:
                    why = self._refused.get(operand) or self._made_whole(operand)
                    return f"it is used together with another that stays whole: {why}"
        replaced = [self._replaced.get(elements[k]) for k in range(len(kinds))]
        for param, kind in zip(replaced, kinds, strict=True):
            if param is None and len(registry.extents(kind)) > 1:
                extents = ", ".join(map(str, registry.extents(kind)))
                return f"{call.args[0].name_hint} makes a tensor [{extents}] of all its rows"
            if param is not None and param not in operands:
                return f"{call.args[0].name_hint} replaces what it does not read"
        results = tuple(elements[k] for k in range(len(kinds)))
        return _Reader(call, tuple(dict.fromkeys(gradients)), results, tuple(replaced))

    def _read(self, reader: _Reader) -> None:
        """Bind the parts of gradients and what a reader makes of each, one after the other.

        Each reader has parts of its own: those of clipping's norms are gone before the updates'.
        """
        call = reader.call
        made: list[list[relax.Var]] = [[] for _ in reader.elements]
        all_rows = self._gradients[reader.gradients[0]].count
        for begin, end in pairwise(_bounds(all_rows)):
            count = end - begin
            parts = {each: self._gradients[each].part(begin, count) for each in reader.gradients}
            operands = []
            for operand in call.args[1].fields:
                if operand in parts:
                    operands.append(parts[operand])
                elif constant(_first_extent(operand.ty)) == all_rows:
                    view = rows(operand, begin, count)
                    operands.append(self._new(view, f"{operand.name}_rows"))
                else:
                    operands.append(operand)
            kinds = [
                relax.TensorType([count, *registry.extents(kind)[1:]], registry.dtype_name(kind))
                for kind in result_types(call)
            ]
            several = isinstance(call.ty_args[0], relax.TupleType)
            kind = relax.TupleType(kinds) if several else kinds[0]
            kernel = self._kernel(call.args[0], all_rows, count)
            arguments = [kernel, relax.Tuple(operands)]
            value = relax.Call(call.op, arguments, call.attrs, [kind], call.span)
            results = self._new(value, "by_rows")
            for k, known in enumerate(made):
                element = self._new(relax.TupleGetItem(results, k), "part") if several else results
                known.append(element)
        for variable, param, known in zip(reader.elements, reader.replaced, made, strict=True):
            joined = join_rows(known) if param is not None else self._joined(known)
            self._bind(variable, joined)

    def _joined(self, parts: list[relax.Var]) -> relax.Call:
        """Copy sums of rows side by side."""
        return self._builder.call_te(
            lambda *tensors: topi.concatenate(tensors, 0), *parts, primfunc_name_hint="join_rows"
        )

    def _kernel(self, variable: tvm.ir.GlobalVar, before: int, count: int) -> tvm.ir.GlobalVar:
        """Return the kernel for so many rows."""
        if (variable, count) not in self._kernels:
            kernel = with_rows(self._mod[variable], before, count)
            name = f"{variable.name_hint}_rows"
            self._kernels[variable, count] = self._builder.add_func(kernel, name)
        return self._kernels[variable, count]

    def _new(self, value: relax.Expr, name: str) -> relax.Var:
        normal = self._builder.normalize(value)
        variable = relax.Var(name, normal.ty)
        self._bindings.append(relax.VarBinding(variable, normal))
        return variable

    def _bind(self, variable: relax.Var, value: relax.Expr) -> None:
        self._bindings.append(relax.VarBinding(variable, self._builder.normalize(value)))


def with_rows(kernel: tirx.PrimFunc, before: int, count: int) -> tirx.PrimFunc:
    """Return a kernel for which `_goes_by_rows` holds, for another number of rows."""

    def replace(number: Any, mutator: Any) -> Any:
        del mutator
        is_rows = int(number.value) == before and str(number.ty) == "int64"
        return tirx.IntImm("int64", count) if is_rows else number

    return tvm_ffi.structural_mutate(kernel, (prim.IntImm, replace))


def _bounds(count: int) -> Iterator[int]:
    """Rows at which parts of a gradient begin, and the last one's end: whole blocks of the head."""
    unit = vocabulary_head.BLOCK_CLASSES
    step = -(-count // (PARTS * unit)) * unit
    yield from range(0, count, step)
    yield count


def _large_extents(kind: Any) -> tuple[int, int] | None:
    """Rows and columns of a float32 table that is worth splitting."""
    extents = [constant(extent) for extent in registry.extents(kind)]
    if registry.dtype_name(kind) != "float32" or len(extents) != 2:
        return None
    count, width = extents
    if count is None or width is None:
        return None
    is_large = 4 * count * width >= LEAST_BYTES and count >= 2 * vocabulary_head.BLOCK_CLASSES
    return (count, width) if is_large else None


def _extents(variable: relax.Var) -> list[int | None]:
    """Extents of a tensor, None for symbolic ones; empty for what is none."""
    is_tensor = isinstance(variable.ty, relax.TensorType)
    return [constant(extent) for extent in registry.extents(variable.ty)] if is_tensor else []


def _size(variable: relax.Var) -> int:
    """Elements of a matrix that no dim is in; 0 for others."""
    extents = _extents(variable)
    return math.prod(filter(None, extents)) if len(extents) == 2 and None not in extents else 0


def _first_extent(kind: Any) -> Any:
    extents = registry.extents(kind) if isinstance(kind, relax.TensorType) else []
    return extents[0] if extents else None


def _goes_by_rows(kernel: Any, count: int) -> bool:
    """Whether a kernel makes each of `count` rows of its results from those rows of operands."""
    if not isinstance(kernel, tirx.PrimFunc) or not all(map(is_buffer, kernel.params)):
        return False
    staged = read_stages(kernel)
    if staged is None:
        return False
    known = (*staged.inputs, *staged.outputs, *staged.local)
    with_count = [b for b in known if b.shape and constant(b.shape[0]) == count]
    if any(constant(n) == count for b in known for n in list(b.shape)[1:]):
        return False
    if any(not any(b.same_as(other) for other in with_count) for b in staged.outputs):
        return False
    for stage in staged.stages:
        row = [axis for axis in stage.spatial if constant(axis.extent) == count]
        if len(row) != 1 or any(constant(axis.extent) == count for axis in stage.reduced):
            return False
        if not stage.indices or not stage.indices[0].same_as(row[0].var):
            return False
        for load in (load for expr in stage.expressions for load in loads_of(expr)):
            if any(load.source.same_as(b) for b in with_count):
                if not load.indices[0].same_as(row[0].var):
                    return False
    return True
