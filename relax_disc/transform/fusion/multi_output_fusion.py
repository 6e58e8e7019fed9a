"""Write kernels that `find_joins` chose as one kernel with several results."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from typing import Any

import tvm
from tvm import relax, tirx

from relax_disc.transform.functions import block_like, copy_module, program_functions, with_blocks
from relax_disc.transform.fusion.fusion_groups import blocks_of
from relax_disc.transform.fusion.producers import operands_of
from relax_disc.transform.fusion.sibling_kernels import Copy, Join, find_joins


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
