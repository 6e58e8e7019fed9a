"""Compute cheap values again in each kernel that reads them, instead of writing them to memory.

A value that several kernels read is written by one and kept until the last has read it: of
``silu(gate)`` the forward pass needs the product with another tensor, the backward pass one more,
and so it lies in memory in between.  What it is computed from is often kept anyway.  Then each
reader computes it for itself from that, inside its own loops: less memory, and less traffic.  XLA
and PyTorch's Inductor do the same for the same reason.

A value is given to its readers if no step of its computation is more than element-wise, all that
read it can be fused with it, the bytes that move become fewer, and no more is kept in its place.
A reader with more elements than the value would compute some of them repeatedly; it may do so only
where nothing is computed, as of the rows of a table that a sequence has positions for.

A value is computed once if a reader compares it with another, as the gradient of ``amax`` does with
what that found: kernels round as their loops are made, and equal values would differ.

Of a value that something else reads too, pooling say, only the readers long after that compute it
for themselves, from what is kept for them anyway: it need not lie in memory until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import tvm
from tvm import ir, relax

from relax_disc.ops.operand_views import Uses, operands_of
from relax_disc.transform.functions import (
    block_like,
    copy_module,
    is_reshape,
    program_functions,
    with_blocks,
)
from relax_disc.transform.fusion.fusion_groups import FusionGroup, blocks_of
from relax_disc.transform.fusion.fusion_plan import plan_fusion
from relax_disc.transform.fusion.producers import (
    INJECTIVE,
    MOST_WORK,
    REDUCTION,
    at_most,
    bytes_of,
    compares,
    elements_of,
    is_small_beside,
    kernel_of,
    pattern_of,
    work_of,
)

_MOST_READERS = 4
# A value is not kept for readers so many bindings behind the last that needs it in memory.
_LEAST_GAP = 32
# Readers of what was given to readers are seen in the next round.
_ROUNDS = 3


@tvm.transform.module_pass(opt_level=0, name="InlineProducers")
class InlineProducers:
    """Give cheap values to their readers; run after `AnnotateTIROpPattern`, before fusion."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with bindings repeated, such that `FuseOps` fuses each copy."""
        del ctx
        refused: set[relax.Var] = set()
        rounds, found = 0, _candidates(mod, plan_fusion(mod))
        while rounds < _ROUNDS:
            changed, given = _given_to_readers(mod, found, refused)
            if not given:
                break
            changed_groups = plan_fusion(changed)
            # Fusion has limits of its own (operands of a kernel, its length).
            if unfused := _unfused(changed_groups, given):
                refused |= unfused
                continue
            mod, rounds = changed, rounds + 1
            found = _candidates(mod, changed_groups) if rounds < _ROUNDS else {}
        return mod


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A value, the bindings that compute it from what is in memory, and its readers."""

    cone: tuple[relax.Binding, ...]  # in order; the last one makes the value
    # kernels, each with the variables of its operators that read the value
    readers: list[tuple[FusionGroup, list[relax.Var]]]
    stays: bool

    @property
    def value(self) -> relax.Var:
        """What the cone makes and the readers read."""
        return self.cone[-1].var


_Groups = Mapping[ir.GlobalVar, list[FusionGroup]]
_Candidates = Mapping[ir.GlobalVar, list[_Candidate]]


def _candidates(mod: tvm.IRModule, groups: _Groups) -> _Candidates:
    """Find the candidates of each program."""
    return {
        variable: list(_Finder(mod, function, groups[variable]).candidates())
        for variable, function in program_functions(mod)
    }


def _given_to_readers(
    mod: tvm.IRModule, found: _Candidates, refused: set[relax.Var]
) -> tuple[tvm.IRModule, dict[relax.Var, frozenset[relax.Var]]]:
    """Give values to their readers; return also the variables that compute copies of each."""
    result, given = copy_module(mod), {}
    for variable, function in program_functions(mod):
        chosen = _without_conflicts(c for c in found[variable] if c.value not in refused)
        if chosen:
            changed, copies = _Rewriter(chosen).run(function)
            result.update_func(variable, changed)
            given |= copies
    return relax.transform.Normalize()(result), given


def _unfused(groups: _Groups, given: dict[relax.Var, frozenset[relax.Var]]) -> set[relax.Var]:
    """Return the values of whose copies a part is a kernel of its own."""
    written = {group.bindings[-1].var for each in groups.values() for group in each}
    return {value for value, copies in given.items() if copies & written}


class _Finder:
    """Finds the candidates of a function."""

    def __init__(
        self, mod: tvm.IRModule, function: relax.Function, groups: list[FusionGroup]
    ) -> None:
        self._mod = mod
        self._uses = Uses.of(function)
        self._groups = groups
        self._group_of = {b.var: g for g in groups for b in g.bindings}
        self._parameters = frozenset(function.params)
        bindings = (b for block in blocks_of(function) for b in block.bindings)
        self._place = {binding.var: place for place, binding in enumerate(bindings)}

    def candidates(self) -> Iterator[_Candidate]:
        """Yield the values that are worth giving to their readers, in order."""
        for group in self._groups:
            value = group.bindings[-1].var
            if not isinstance(value, relax.DataflowVar):
                continue
            if not all(pattern_of(self._mod, b.value) <= INJECTIVE for b in group.bindings):
                continue
            if not self._is_closed(group):
                continue
            if sum(work_of(self._mod, b.value) for b in group.bindings) > MOST_WORK:
                continue
            candidate = self._candidate(group)
            least = 1 if candidate.stays else 2
            if least <= len(candidate.readers) <= _MOST_READERS and self._is_better(candidate):
                yield candidate

    def _is_closed(self, group: FusionGroup) -> bool:
        """Whether all but the last value are used inside; of equal operators groups may mix up."""
        inside = {binding.var for binding in group.bindings}
        return all(
            variable in inside
            for binding in group.bindings[:-1]
            for variable, _ in self._uses.users_of(binding.var)
        )

    def _candidate(self, group: FusionGroup) -> _Candidate:
        """Return a value with the kernels that can compute it, late ones if others cannot."""
        value = group.bindings[-1].var
        users = self._uses.users_of(value)
        able = [v for v, call in users if self._is_able(v, call)]
        others = [v for v, call in users if not self._is_able(v, call)]
        if any(v is None for v in others) or self._is_compared(group, able):  # a result
            able = []
        elif others:
            late = max(self._place[v] for v in others) + _LEAST_GAP
            able = [v for v in able if self._place[v] >= late]
        readers: dict[relax.Var, tuple[FusionGroup, list[relax.Var]]] = {}
        for variable in able:
            reader = self._group_of[variable]
            readers.setdefault(reader.result, (reader, []))[1].append(variable)
        return _Candidate(group.bindings, list(readers.values()), bool(others))

    def _is_compared(self, group: FusionGroup, readers: list[relax.Var | None]) -> bool:
        """Whether a kernel that would compute the value compares it with another one."""
        if not any(work_of(self._mod, b.value) for b in group.bindings):  # it copies
            return False
        kernels = {self._group_of[v].result: self._group_of[v] for v in readers if v is not None}
        return any(compares(self._mod, b.value) for g in kernels.values() for b in g.bindings)

    def _is_able(self, variable: relax.Var | None, call: relax.Expr) -> bool:
        return variable in self._group_of and pattern_of(self._mod, call) <= REDUCTION

    def _is_better(self, candidate: _Candidate) -> bool:
        """Whether fewer bytes move, no more are kept, and no reader computes an element twice."""
        size = bytes_of(candidate.value)
        if size is None or is_reshape(kernel_of(self._mod, candidate.cone[-1].value)):
            return False
        made = {binding.var for binding in candidate.cone}
        leaves = {x for b in candidate.cone for x in operands_of(b.value)} - made
        large = {leaf for leaf in leaves if not is_small_beside(leaf, candidate.value)}
        moved = 0
        is_copy = not any(work_of(self._mod, b.value) for b in candidate.cone)
        for group, reading in candidate.readers:
            touched = {b.var for b in group.bindings}
            touched |= {x for v in reading for x in operands_of(self._uses.definitions[v])}
            if not is_copy and not all(
                at_most(elements_of(x), elements_of(candidate.value)) for x in touched
            ):
                return False
            read = {x for b in group.bindings for x in operands_of(b.value)}
            moved += len(large - read)
        spared = len(candidate.readers) + (0 if candidate.stays else len(large) + 1)
        if moved > spared:
            return False
        last = max(self._place[v] for _, variables in candidate.readers for v in variables)
        longer = [
            leaf
            for leaf in large - self._parameters
            if not any(
                variable is None or (variable not in made and self._place[variable] >= last)
                for variable, _ in self._uses.users_of(leaf)
            )
        ]
        if candidate.stays:
            return not longer
        return not longer or (len(longer) == 1 and at_most(bytes_of(longer[0]), size))


def _without_conflicts(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    """Leave for the next round what reads, or is read by, a value of this round."""
    chosen: list[_Candidate] = []
    values: set[relax.Var] = set()
    readers: set[relax.Var] = set()
    for candidate in candidates:
        reading = {b.var for group, _ in candidate.readers for b in group.bindings}
        if candidate.value not in readers and not reading & values:
            chosen.append(candidate)
            values.add(candidate.value)
            readers |= reading
    return chosen


class _Rewriter:
    """Repeats the bindings of candidates before each reader."""

    def __init__(self, candidates: list[_Candidate]) -> None:
        self._builder = relax.BlockBuilder()
        self._repeats: dict[relax.Var, list[tuple[_Candidate, int]]] = {}
        for candidate in candidates:
            for number, (_, variables) in enumerate(candidate.readers):
                for variable in variables:
                    self._repeats.setdefault(variable, []).append((candidate, number))
        self._removed = {b.var for each in candidates if not each.stays for b in each.cone}
        self._made: dict[tuple[relax.Var, int], dict[relax.Var, relax.Var]] = {}

    def run(
        self, function: relax.Function
    ) -> tuple[relax.Function, dict[relax.Var, frozenset[relax.Var]]]:
        """Return the changed function, and for each value the variables of its copies' cones."""
        blocks = [
            block_like(block, [new for b in block.bindings for new in self._written(b)])
            for block in blocks_of(function)
        ]
        copies: dict[relax.Var, frozenset[relax.Var]] = {}
        for (value, _), names in self._made.items():
            copies[value] = copies.get(value, frozenset()).union(names.values())
        return with_blocks(function, blocks), copies

    def _written(self, binding: relax.Binding) -> Iterator[relax.Binding]:
        if binding.var in self._removed:
            return
        names: dict[relax.Var, relax.Var] = {}
        for candidate, reader in self._repeats.get(binding.var, ()):
            key = candidate.value, reader
            if key not in self._made:  # before the reader's first use of it
                copies = self._made[key] = {}
                for part in candidate.cone:
                    value = self._with(part.value, copies)
                    copies[part.var] = relax.DataflowVar(part.var.name, part.var.ty)
                    yield relax.VarBinding(copies[part.var], value, part.span)
            names[candidate.value] = self._made[key][candidate.value]
        if names:
            yield relax.VarBinding(binding.var, self._with(binding.value, names), binding.span)
        else:
            yield binding

    def _with(self, call: relax.Call, names: dict[relax.Var, relax.Var]) -> relax.Expr:
        """Return a kernel's call with other operands."""
        fields = [names.get(x, x) for x in call.args[1].fields]
        arguments = [call.args[0], relax.Tuple(fields), *call.args[2:]]
        changed = relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)
        return self._builder.normalize(changed)
