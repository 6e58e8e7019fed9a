"""TVM's fusion of kernels, kernels with several results, and the lines of the user's model.

`FuseOps` moves operators into functions of their own and calls those; the call has no line, and
functions that are alike become one, so that the lines inside are those of its first use.  Here each
call is matched with the bindings that it replaced: it takes the line of the one that made its
result.  That line is what a memory report or an error names.  TVM joins a kernel with what reads
its result; `join_kernels` joins those that read the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import chain
from typing import Any

import tvm
from tvm import relax, tirx

from relax_disc.ops.operand_views import operands_of
from relax_disc.transform.functions import (
    at_span,
    block_like,
    copy_module,
    program_functions,
    with_blocks,
)
from relax_disc.transform.fusion.counter_kernels import find_counters
from relax_disc.transform.fusion.fusion_groups import blocks_of, fuse_ops
from relax_disc.transform.fusion.fusion_plan import plan_fusion
from relax_disc.transform.fusion.kernel_graph import Copy, Join, dims_of
from relax_disc.transform.fusion.reduction_chains import find_chains
from relax_disc.transform.fusion.sibling_kernels import find_joins


@tvm.transform.module_pass(opt_level=0, name="FuseKernels")
class FuseKernels:
    """`FuseOps` and `FuseTIR`; calls of fused kernels have the span of what they compute.

    Parameters
    ----------
    join : bool
        Whether kernels that read the same values become one (`join_kernels`).
    accepts : function of (PrimFunc), optional
        Whether the target's rules take a kernel of several reductions. With it reductions become
        one kernel with what follows them (`relax_disc.transform.fusion.reduction_chains`).
    """

    def __init__(
        self, join: bool = True, accepts: Callable[[tirx.PrimFunc], bool] | None = None
    ) -> None:
        self.join, self.accepts = join, accepts

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with fused kernels."""
        del ctx
        plan_fusion.cache_clear()  # earlier passes have asked; nothing keeps their module
        grouped, groups = fuse_ops(mod)
        spans: dict[Any, Any] = {}
        for group in chain.from_iterable(groups.values()):
            located = [span for span in map(_span_of, group.bindings) if span is not None]
            if located:
                spans[group.result] = located[-1]
        if self.join:
            grouped = join_kernels(grouped)
        if self.join and self.accepts is not None:
            result = _with_chains(grouped, self.accepts)
        else:
            result = relax.transform.FuseTIR()(grouped)
        for variable, function in program_functions(result):
            for binding in chain.from_iterable(block.bindings for block in blocks_of(function)):
                if isinstance(binding.value, relax.TupleGetItem) and binding.var in spans:
                    spans[binding.value.tuple_value] = spans[binding.var]
            blocks = [
                block_like(block, [_located(binding, spans) for binding in block.bindings])
                for block in blocks_of(function)
            ]
            if blocks:
                result.update_func(variable, with_blocks(function, blocks))
        return relax.transform.Normalize()(result)


def _span_of(binding: relax.Binding) -> Any:
    return getattr(binding.value, "span", None) or binding.var.span


def _located(binding: relax.Binding, spans: dict[Any, Any]) -> relax.Binding:
    span, value = spans.get(binding.var), binding.value
    if span is None or not isinstance(value, relax.Call) or value.span is not None:
        return binding
    return relax.VarBinding(binding.var, at_span(value, span), span)


def join_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    """Join kernels that read the same values.

    ``mod``: after `FuseOps`, before `FuseTIR`. Returned: with fused functions that return tuples;
    elements of those are bound to the variables that the kernels were bound to.
    """
    return _joined(mod, find_joins)[0]


def _with_chains(mod: tvm.IRModule, accepts: Callable[[tirx.PrimFunc], bool]) -> tvm.IRModule:
    """Join reductions with what follows them, and counters; run `FuseTIR`.

    Whether rules take a kernel shows in its loops; what they do not take is left apart.
    """
    refused: set[relax.Var] = set()

    def find(mod: tvm.IRModule, function: relax.Function, block: Any) -> list[Join]:
        chains = find_chains(mod, function, block, lambda values: values[0] in refused)
        counters = find_counters(mod, function, block)
        return [*chains, *counters]

    while True:
        joined, names = _joined(mod, find)
        result = relax.transform.FuseTIR()(joined)
        failed = {
            first
            for first, name in names.items()
            if not (isinstance(kernel := result[name], tirx.PrimFunc) and accepts(kernel))
        }
        if not failed:
            return result
        refused |= failed


def _joined(
    mod: tvm.IRModule, find: Callable[[tvm.IRModule, relax.Function, Any], list[Join]]
) -> tuple[tvm.IRModule, dict[relax.Var, str]]:
    """Join what ``find`` finds; return also, for the first value of each join, its function."""
    builder = relax.BlockBuilder(copy_module(mod))
    changed = {}
    names: dict[relax.Var, str] = {}
    for variable, function in program_functions(mod):
        blocks = blocks_of(function)
        for number, block in enumerate(blocks):
            if joins := find(mod, function, block):
                writer = _Writer(builder, mod, list(block.bindings), joins)
                blocks[number] = block_like(block, writer.run())
                changed[variable] = with_blocks(function, blocks)
                names |= writer.names
    if not changed:
        return mod, {}
    result = builder.get()
    for variable, function in changed.items():
        result.update_func(variable, function)
    result = relax.transform.DeadCodeElimination()(relax.transform.Normalize()(result))
    return result, names


class _Writer:
    """Writes the bindings of a block anew."""

    def __init__(
        self,
        builder: relax.BlockBuilder,
        mod: tvm.IRModule,
        bindings: list[relax.Binding],
        joins: list[Join],
    ) -> None:
        self._builder, self._mod, self._bindings = builder, mod, bindings
        self._place = {binding.var: place for place, binding in enumerate(bindings)}
        self._join_of = {place: join for join in joins for place in join.places}
        self._copies: dict[int, dict[relax.Var, relax.Var]] = {}  # per reader: old -> new
        self._maker: dict[relax.Var, int] = {}  # of a copy: the last place of its join
        self._new_bindings: dict[int, list[relax.Binding]] = {}
        self._readers: dict[relax.Var, set[int]] = {}
        for place, binding in enumerate(bindings):
            for operand in operands_of(binding.value):
                self._readers.setdefault(operand, set()).add(place)
        self.names: dict[relax.Var, str] = {}  # first value of each join -> its function
        for join in joins:
            self._write(join)

    def run(self) -> list[relax.Binding]:
        """Return all bindings, each after what it needs, otherwise in the old order."""
        places = range(len(self._bindings))
        needs = {self._last(p): {self._last(q) for q in self._needs(p)} for p in places}
        sorter = TopologicalSorter(needs)
        sorter.prepare()  # raises on a circle
        ready: list[int] = []
        result: list[relax.Binding] = []
        while sorter.is_active():
            for place in sorter.get_ready():
                heappush(ready, place)
            place = heappop(ready)
            result += self._new_bindings.get(place) or [self._renamed(place)]
            sorter.done(place)
        return result

    def _last(self, place: int) -> int:
        """Last place of the join that a binding belongs to; its own if there is none."""
        join = self._join_of.get(place)
        return place if join is None else join.places[-1]

    def _needs(self, place: int) -> set[int]:
        """Bindings that one needs, with those of its join."""
        join = self._join_of.get(place)
        places = [place] if join is None else _members(join)
        needed: set[int] = set()
        for each in places:
            copies = self._copies.get(each, {})
            for operand in operands_of(self._bindings[each].value):
                if operand in copies:
                    needed.add(self._maker[copies[operand]])
                elif operand in self._place:
                    needed.add(self._place[operand])
        return needed.difference(places)

    def _renamed(self, place: int) -> relax.Binding:
        binding, copies = self._bindings[place], self._copies.get(place)
        if not copies:
            return binding
        return relax.VarBinding(binding.var, _with_operands(binding.value, copies), binding.span)

    def _write(self, join: Join) -> None:
        """Make the fused function of a join, and the bindings that call it."""
        members = [self._bindings[place] for place in _members(join)]
        made = {binding.var for binding in members}
        read = dict.fromkeys(x for b in members for x in operands_of(b.value))
        arguments = [x for x in read if x not in made]
        results = [
            x for x in members if x.var in made - set(read) or self._is_read_outside(x, join)
        ]
        function = self._fused(members, arguments, [x.var for x in results])
        names = [_function_of(binding.value).name_hint for binding in members]
        name = "fused_" + "_and_".join(n.removeprefix("fused_") for n in names)
        called = self._builder.add_func(function, name)
        self.names[members[0].var] = called.name_hint
        call = self._builder.normalize(relax.Call(called, arguments))
        if len(results) == 1:
            (only,) = results
            self._new_bindings[join.places[-1]] = [relax.VarBinding(only.var, call)]
            return
        together = relax.DataflowVar(f"{members[0].var.name}_results", call.ty)
        bindings: list[relax.Binding] = [relax.VarBinding(together, call)]
        copies = {self._bindings[copy.place].var: copy for copy in join.again}
        for index, binding in enumerate(results):
            value = relax.TupleGetItem(together, index)
            if binding.var in copies:
                bindings += self._copied(copies[binding.var], value)
                self._maker.update((b.var, join.places[-1]) for b in bindings)
            else:
                bindings.append(relax.VarBinding(binding.var, value))
        self._new_bindings[join.places[-1]] = bindings

    def _copied(self, copy: Copy, value: relax.Expr) -> list[relax.Binding]:
        """Bind a copy and its views; note who reads them."""
        names: dict[relax.Var, relax.Var] = {}
        bindings: list[relax.Binding] = []
        for place in (copy.place, *copy.views):
            old = self._bindings[place]
            new = value if place == copy.place else _with_operands(old.value, names)
            names[old.var] = relax.DataflowVar(f"{old.var.name}_again", old.var.ty)
            bindings.append(relax.VarBinding(names[old.var], new, old.span))
        for reader in copy.readers:
            self._copies.setdefault(reader, {}).update(names)
        return bindings

    def _is_read_outside(self, binding: relax.Binding, join: Join) -> bool:
        """Whether a value is read by more than the kernels of its join."""
        readers = self._readers.get(binding.var, set())
        return not isinstance(binding.var, relax.DataflowVar) or not readers <= {*join.places}

    def _fused(
        self, members: list[relax.Binding], arguments: list[relax.Var], results: list[relax.Var]
    ) -> relax.Function:
        """Make one function of several, with some of the values as its results.

        One after the other, nothing in common but values: so the analysis of what may be
        overwritten holds for schedules that run them in one loop and for those that run them in
        turn.
        """
        parameters = [relax.Var(x.name, x.ty) for x in arguments]
        outer: dict[relax.Var, relax.Var] = dict(zip(arguments, parameters, strict=True))
        bindings: list[relax.Binding] = []
        for member in members:
            call: Any = member.value
            if isinstance(call.op, tvm.ir.GlobalVar):
                group = self._mod[call.op]
                group = group.bind_symbolic_vars(dims_of(group, call))
                names = {p: outer[x] for p, x in zip(group.params, call.args, strict=True)}
                inner, result = list(group.body.blocks[0].bindings), group.body.body
            else:
                names, inner, result = dict(outer), [member], member.var
            for binding in inner:
                value = self._builder.normalize(_with_operands(binding.value, names))
                names[binding.var] = relax.DataflowVar(binding.var.name, value.ty)
                bindings.append(relax.VarBinding(names[binding.var], value, binding.span))
            outer[member.var] = names[result]
        made = [outer[x] for x in results]
        value = self._builder.normalize(made[0] if len(made) == 1 else relax.Tuple(made))
        output = relax.Var("results", value.ty)
        bindings.append(relax.VarBinding(output, value))
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], output)
        function = relax.Function(parameters, body, value.ty, True)
        return relax.utils.copy_with_new_vars(function).with_attr("Primitive", True)


def _function_of(call: Any) -> tvm.ir.GlobalVar:
    """Return the fused function, or the kernel, that is called."""
    return call.op if isinstance(call.op, tvm.ir.GlobalVar) else call.args[0]


def _members(join: Join) -> list[int]:
    return [*join.places, *(copy.place for copy in join.again)]


def _with_operands(value: Any, names: Mapping[relax.Var, relax.Var]) -> relax.Expr:
    """Return a call with other variables in its arguments, or another variable."""

    def changed(argument: Any) -> Any:
        if isinstance(argument, relax.Tuple):
            return relax.Tuple([changed(field) for field in argument.fields])
        return names.get(argument, argument) if isinstance(argument, relax.Var) else argument

    if isinstance(value, relax.Var):
        return changed(value)
    arguments = [changed(argument) for argument in value.args]
    return relax.Call(value.op, arguments, value.attrs, value.ty_args, value.span)
