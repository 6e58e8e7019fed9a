"""TVM's fusion of kernels, kernels with several results, and the lines of the user's model.

`FuseOps` moves operators into functions of their own and calls those; the call has no line, and
functions that are alike become one, so that the lines inside are those of its first use.  Here each
call is matched with the bindings that it replaced: it takes the line of the one that made its
result.  That line is what a memory report or an error names.  TVM joins a kernel with what reads
its result; `join_kernels` joins those that read the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from relax_disc.transform.fusion.fusion_groups import blocks_of, fuse_ops
from relax_disc.transform.fusion.fusion_plan import plan_fusion
from relax_disc.transform.fusion.sibling_kernels import Copy, Join, find_joins


@tvm.transform.module_pass(opt_level=0, name="FuseKernels")
class FuseKernels:
    """`FuseOps` and `FuseTIR`; calls of fused kernels have the span of what they compute.

    Parameters
    ----------
    join : bool
        Whether kernels that read the same values become one (`relax_disc.transform.join_kernels`).
    """

    def __init__(self, join: bool = True) -> None:
        self.join = join

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
    builder = relax.BlockBuilder(copy_module(mod))
    changed = {}
    for variable, function in program_functions(mod):
        blocks = blocks_of(function)
        for number, block in enumerate(blocks):
            if joins := find_joins(mod, function, block):
                writer = _Writer(builder, mod, list(block.bindings), joins)
                blocks[number] = block_like(block, writer.run())
                changed[variable] = with_blocks(function, blocks)
    if not changed:
        return mod
    result = builder.get()
    for variable, function in changed.items():
        result.update_func(variable, function)
    return relax.transform.DeadCodeElimination()(relax.transform.Normalize()(result))


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
        arguments = list(dict.fromkeys(x for b in members for x in operands_of(b.value)))
        function = self._fused(members, arguments)
        names = [_function_of(binding.value).name_hint for binding in members]
        name = "fused_" + "_and_".join(n.removeprefix("fused_") for n in names)
        called = self._builder.add_func(function, name)
        call = self._builder.normalize(relax.Call(called, arguments))
        results = relax.DataflowVar(f"{members[0].var.name}_results", call.ty)
        bindings: list[relax.Binding] = [relax.VarBinding(results, call)]
        for index, binding in enumerate(members[: len(join.places)]):
            bindings.append(relax.VarBinding(binding.var, relax.TupleGetItem(results, index)))
        for index, copy in enumerate(join.again, len(join.places)):
            bindings += self._copied(copy, relax.TupleGetItem(results, index))
            self._maker.update((b.var, join.places[-1]) for b in bindings)
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

    def _fused(self, members: list[relax.Binding], arguments: list[relax.Var]) -> relax.Function:
        """Make one function of several.

        One after the other, nothing in common: so the analysis of what may be overwritten holds
        for schedules that run them in one loop and for those that run them in turn.
        """
        parameters = [relax.Var(x.name, x.ty) for x in arguments]
        outer = dict(zip(arguments, parameters, strict=True))
        bindings: list[relax.Binding] = []
        results: list[relax.Expr] = []
        for member in members:
            call: Any = member.value
            if isinstance(call.op, tvm.ir.GlobalVar):
                group = _with_sizes_of(self._mod[call.op], call)
                names = {p: outer[x] for p, x in zip(group.params, call.args, strict=True)}
                inner, result = list(group.body.blocks[0].bindings), group.body.body
            else:
                names, inner, result = dict(outer), [member], member.var
            for binding in inner:
                value = self._builder.normalize(_with_operands(binding.value, names))
                names[binding.var] = relax.DataflowVar(binding.var.name, value.ty)
                bindings.append(relax.VarBinding(names[binding.var], value, binding.span))
            results.append(names[result])
        tuple_ = self._builder.normalize(relax.Tuple(results))
        output = relax.Var("results", tuple_.ty)
        bindings.append(relax.VarBinding(output, tuple_))
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], output)
        function = relax.Function(parameters, body, tuple_.ty, True)
        return relax.utils.copy_with_new_vars(function).with_attr("Primitive", True)


def _function_of(call: Any) -> tvm.ir.GlobalVar:
    """Return the fused function, or the kernel, that is called."""
    return call.op if isinstance(call.op, tvm.ir.GlobalVar) else call.args[0]


def _members(join: Join) -> list[int]:
    return [*join.places, *(copy.place for copy in join.again)]


def _with_sizes_of(group: relax.Function, call: relax.Call) -> relax.Function:
    """Return a fused function in the terms of its caller's dims."""
    sizes: dict[Any, Any] = {}
    for parameter, argument in zip(group.params, call.args, strict=True):
        ours: Any = parameter.ty
        theirs: Any = argument.ty
        for dim, size in zip(ours.shape.values, theirs.shape.values, strict=True):
            if isinstance(dim, tirx.Var):
                sizes[dim] = size
    return group.bind_symbolic_vars(sizes)


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
