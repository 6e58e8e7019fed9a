"""Which operators TVM's `FuseOps` will put into one kernel, found without running it.

`FuseOps` counts for each value the operators up to the one behind which all its readers lie: for a
value that the backward pass reads again that is half of the step, and the pass takes time with the
square of its length.  Passes that only ask what would be fused ask here.  The rules are TVM's: a
value joins its immediate post-dominator, with all that lies between, if everything there can be
fused with it.

Limits: no limit on the operands of a kernel, which TVM sets for other targets than ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import ir, relax

from relax_disc.ops.operand_views import operands_of
from relax_disc.transform.functions import program_functions
from relax_disc.transform.fusion.fusion_groups import (
    OPAQUE,
    FusionGroup,
    blocks_of,
    fills_compound,
    most_operators,
)

# TVM's kinds of operators, in the order of what they can be fused with.
_ELEMENTWISE, _BROADCAST, _INJECTIVE, _REDUCTION, _ANCHOR = range(5)
_CALL_TIR = ir.Op.get("relax.call_tir")

_Accepts = Callable[[int, bool], bool]  # (kind of a group, whether it is the last) -> fuses


@functools.lru_cache(maxsize=1)  # by identity; the next pass asks about the module that one returns
def plan_fusion(mod: tvm.IRModule) -> dict[ir.GlobalVar, list[FusionGroup]]:
    """Return for each program the groups that `FuseOps` would make, in the order of their results.

    An operator that it would leave alone is a group of one.
    """
    kinds: dict[ir.GlobalVar, int] = {}

    def kind_of(kernel: ir.GlobalVar) -> int:
        if kernel not in kinds:
            function: Any = mod[kernel]
            kind = function.attrs.get("op_pattern", OPAQUE)
            kinds[kernel] = OPAQUE if fills_compound(function) else int(kind)
        return kinds[kernel]

    return {
        variable: _Partition(function, kind_of).groups()
        for variable, function in program_functions(mod)
    }


class _Partition:
    """The bindings of a function's dataflow blocks as a graph, in groups; nodes by number."""

    def __init__(self, function: relax.Function, kind_of: Callable[[ir.GlobalVar], int]) -> None:
        self._bindings = [
            binding
            for block in blocks_of(function)
            if isinstance(block, relax.DataflowBlock)
            for binding in block.bindings
        ]
        self._place = place = {binding.var: k for k, binding in enumerate(self._bindings)}
        self._kinds = [_kind(binding, kind_of) for binding in self._bindings]
        self._readers: list[list[int]] = [[] for _ in self._bindings]
        for k, binding in enumerate(self._bindings):
            for operand in operands_of(binding.value):
                if (maker := place.get(operand)) is not None:
                    self._readers[maker].append(k)
        self._root = list(range(len(self._bindings)))
        self._group_kind = list(self._kinds)
        self._size = [1] * len(self._bindings)

    def groups(self) -> list[FusionGroup]:
        """Group the bindings."""
        context: Any = tvm.transform.PassContext.current()
        if context.opt_level > 0:
            most = most_operators()
            dominators = self._dominators()
            for phase in range(2):  # the third is for tuples, which are no kernels here
                for k, (dominator, path) in enumerate(dominators):
                    if dominator is not None:
                        self._try_to_fuse(k, dominator, path, phase, most)
        self._leave_out_elements()
        members: dict[int, list[relax.Binding]] = {}
        for k, binding in enumerate(self._bindings):
            if isinstance(binding.value, relax.Call | relax.TupleGetItem):
                members.setdefault(self._find(k), []).append(binding)
        return [
            FusionGroup(binding.var, tuple(members[root]))
            for k, binding in enumerate(self._bindings)
            if (root := self._find(k)) in members and members[root][-1] is binding
        ]

    def _leave_out_elements(self) -> None:
        """Leave an element alone whose tuple is made by another kernel."""
        roots = [self._find(k) for k in range(len(self._bindings))]
        for k, binding in enumerate(self._bindings):
            if isinstance(binding.value, relax.TupleGetItem):
                maker = self._place.get(binding.value.tuple_value)
                if maker is None or roots[maker] != roots[k]:
                    roots[k] = len(roots) + k
        self._root = [*roots, *range(len(roots), 2 * len(roots))]

    def _dominators(self) -> list[tuple[int | None, int]]:
        """Immediate post-dominator of each node, and the widest kind on the way to it."""
        found: list[tuple[int | None, int]] = [(None, OPAQUE)] * len(self._bindings)
        depth = [1] * len(self._bindings)
        for k in reversed(range(len(self._bindings))):
            if not isinstance(self._bindings[k].var, relax.DataflowVar) or not self._readers[k]:
                continue
            common: int | None = self._readers[k][0]
            path = max(self._kinds[reader] for reader in self._readers[k])
            for other in self._readers[k][1:]:
                right: int | None = other
                while common != right and common is not None and right is not None:
                    left_depth, right_depth = depth[common], depth[right]
                    if left_depth >= right_depth:
                        common, kind = found[common]
                        path = max(path, kind)
                    if right_depth >= left_depth:
                        right, kind = found[right]
                        path = max(path, kind)
                if common != right:
                    common = None
            found[k] = common, path
            depth[k] = 1 if common is None else depth[common] + 1
        return found

    def _try_to_fuse(self, k: int, dominator: int, path: int, phase: int, most: int) -> None:
        kind = self._group_kind[k]
        if kind == OPAQUE or self._find(k) == self._find(dominator):
            return
        accepts: _Accepts
        if kind == _ANCHOR:
            if phase != 0 or path != _ELEMENTWISE:
                return
            accepts = _fuses_behind_anchor
        elif kind <= _BROADCAST:
            if path > _REDUCTION:
                return
            accepts = _fuses_with_elements
        elif kind == _INJECTIVE and phase == 1:
            accepts = _fuses_with_views
        else:
            return
        between = self._between(k, dominator, accepts)
        if not between:
            return
        target = self._find(dominator)
        if self._size[target] + sum(self._size[node] for node in between) > most:
            return
        for node in between:
            self._merge(self._find(node), target)

    def _between(self, k: int, dominator: int, accepts: _Accepts) -> Sequence[int]:
        """Nodes from one up to its dominator, which is left out; none if one is refused."""
        found, waiting = {k: None, dominator: None}, [k]
        if not accepts(self._group_kind[self._find(dominator)], True):
            return ()
        while waiting:
            for reader in self._readers[waiting.pop()]:
                if reader in found:
                    continue
                if not accepts(self._group_kind[self._find(reader)], False):
                    return ()
                found[reader] = None
                waiting.append(reader)
        return [node for node in found if node != dominator]

    def _merge(self, child: int, parent: int) -> None:
        if child == parent:
            return
        self._size[parent] += self._size[child]
        self._root[child] = parent
        if self._group_kind[child] == _ANCHOR:
            self._group_kind[parent] = max(_ANCHOR, self._group_kind[parent])

    def _find(self, k: int) -> int:
        while self._root[k] != k:
            self._root[k] = self._root[self._root[k]]
            k = self._root[k]
        return k


def _kind(binding: relax.Binding, kind_of: Callable[[ir.GlobalVar], int]) -> int:
    value: Any = binding.value
    if isinstance(binding, relax.MatchCast):
        return OPAQUE
    if isinstance(value, relax.TupleGetItem):
        return _INJECTIVE
    if isinstance(value, relax.Call) and value.op == _CALL_TIR:
        return kind_of(value.args[0])
    return OPAQUE


def _fuses_behind_anchor(kind: int, is_last: bool) -> bool:
    del is_last
    return kind <= _BROADCAST


def _fuses_with_elements(kind: int, is_last: bool) -> bool:
    return kind <= (_ANCHOR if is_last else _INJECTIVE)


def _fuses_with_views(kind: int, is_last: bool) -> bool:
    del is_last
    return kind <= _INJECTIVE
