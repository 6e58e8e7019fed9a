"""The kernels of a block as a graph, after `FuseOps`; used to choose those that become one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax.analysis import tir_vars_in_type

from relax_disc.ops.operand_views import Uses, operands_of
from relax_disc.transform.functions import is_reshape
from relax_disc.transform.fusion.producers import kernel_of


@dataclass(frozen=True, slots=True)
class Copy:
    """A second copy of a value."""

    place: int  # binding of the kernel that makes the first
    readers: frozenset[int]  # bindings that read the second
    views: tuple[int, ...]  # reshapes of it through which they do, too


@dataclass(eq=False, slots=True)
class Join:
    """Kernels that become one."""

    places: list[int]  # bindings of the kernels, in order
    again: list[Copy] = field(default_factory=list)  # results of earlier kernels that it makes too


class KernelGraph:
    """Who makes, views and reads each value of a block, and what each binding needs."""

    def __init__(
        self, mod: tvm.IRModule, function: relax.Function, bindings: list[relax.Binding]
    ) -> None:
        self._mod, self._bindings = mod, bindings
        self._place = {binding.var: place for place, binding in enumerate(bindings)}
        self._parameters = set(function.params)
        self._stored: dict[relax.Var, relax.Var] = {}  # reshapes and other names -> what is stored
        self._views = {place for place in range(len(bindings)) if self._note_view(place)}
        self._readers: dict[relax.Var, set[int]] = {}
        self._escaping: set[relax.Var] = set()
        self._note_readers(Uses.of(function))
        # Per binding the bindings that it needs, as bits.
        self._before: list[int] = []
        for binding in bindings:
            needed = [self._place[x] for x in operands_of(binding.value) if x in self._place]
            self._before.append(union(self._before[p] | 1 << p for p in needed))

    def _note_view(self, place: int) -> bool:
        binding = self._bindings[place]
        kernel = kernel_of(self._mod, binding.value)
        is_name = isinstance(binding.value, relax.Var)
        if not is_name and (kernel is None or not is_reshape(kernel)):
            return False
        (shown,) = operands_of(binding.value)
        self._stored[binding.var] = self._stored_of(shown)
        return True

    def _note_readers(self, uses: Uses) -> None:
        for variable in [*self._parameters, *self._place]:
            stored = self._stored_of(variable)
            for user, _ in uses.users_of(variable):
                if user is None or user not in self._place:
                    self._escaping.add(stored)
                elif self._place[user] not in self._views:
                    self._readers.setdefault(stored, set()).add(self._place[user])

    def _is_returned(self, value: relax.Var) -> bool:
        """Whether a value leaves the function, so that it cannot take the place of an operand."""
        readers = (self._bindings[place].value for place in self._readers.get(value, ()))
        return value in self._escaping or any(isinstance(x, relax.Tuple) for x in readers)

    def _are_ready_together(self, one: int, other: int) -> bool:
        """Whether what either of two kernels reads is there when the other can run.

        Then neither depends on the other.
        """
        return all(
            self._before[a] >> self._place[stored] & 1
            for a, b in ((one, other), (other, one))
            for stored in map(self._stored_of, operands_of(self._bindings[b].value))
            if stored in self._place
        )

    def _needs_all(self, places: list[int], before: int) -> None:
        """Note that bindings need all that any of them needs, and whoever needs one needs all."""
        all_ = union(1 << place for place in places)
        for place, needed in enumerate(self._before):
            if place in places:
                self._before[place] = before
            elif needed & all_:
                self._before[place] = needed | before | all_

    def _stored_of(self, value: relax.Var) -> relax.Var:
        return self._stored.get(value, value)


def calls_of(mod: tvm.IRModule, value: relax.Call) -> list[relax.Call]:
    """Calls of kernels that a call of a fused function, or of one kernel, consists of.

    Empty where it is neither, has several results, or takes more than tensors.
    """
    if isinstance(value.op, tvm.ir.GlobalVar):
        function = mod[value.op]
        is_group = isinstance(function, relax.Function) and (function.attrs or {}).get("Primitive")
        if not is_group or not all(isinstance(x, relax.Var) for x in value.args):
            return []
        if len(function.body.blocks) != 1 or not isinstance(function.ret_ty, relax.TensorType):
            return []
        if not sizes_are_dims(list(function.params), function.body.body):
            return []
        calls = [binding.value for binding in function.body.blocks[0].bindings]
    else:
        calls = [value]
    return calls if all(_takes_tensors(mod, call) for call in calls) else []


def dims_of(group: relax.Function, call: relax.Call) -> dict[Any, Any]:
    """Map the dims of a fused function to its caller's sizes."""
    dims: dict[Any, Any] = {}
    for parameter, argument in zip(group.params, call.args, strict=True):
        ours: Any = parameter.ty
        theirs: Any = argument.ty
        for dim, size in zip(ours.shape.values, theirs.shape.values, strict=True):
            if isinstance(dim, tirx.Var):
                dims[dim] = size
    return dims


def _takes_tensors(mod: tvm.IRModule, call: Any) -> bool:
    if kernel_of(mod, call) is None or len(call.args) != 2:
        return False
    return all(isinstance(x, relax.Var) for x in call.args[1].fields)


def sizes_are_dims(operands: list[relax.Var], value: relax.Var) -> bool:
    """Whether a function of the operands knows all dims: each is a whole size of one of them."""
    types = [operand.ty for operand in operands]
    shapes = [getattr(type_, "shape", None) for type_ in types]
    dims = {size for x in shapes if isinstance(x, relax.ShapeExpr) for size in x.values}
    return set(tir_vars_in_type(relax.TupleType([*types, value.ty]))) <= dims


def union(bits: Iterable[int]) -> int:
    """Return the bits that are set in any of several numbers."""
    result = 0
    for each in bits:
        result |= each
    return result
