"""Let updates of parameters share launches, where that keeps next to nothing longer; for CUDA.

The update of a norm's weight is a launch of a few elements.  A joined kernel computes all outputs
of several updates, each over its own shape; the rule for CUDA gives each as many blocks of one
launch as it needs, so every element is computed as before.  It runs when the last gradient of its
updates is there.  Updates that need all the gradients anyway (clipping, sums of gradients) join
without limit; of others the smallest join, as long as all that is kept for them is little.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, s_tir, tirx

from relax_disc.analysis.kernels.inplace import INPLACE_ATTRIBUTE, inplace_pairs
from relax_disc.analysis.kernels.stages import read_stages
from relax_disc.analysis.program.reader import inplace_pairs as replaced_parameters
from relax_disc.ops.operand_views import Uses
from relax_disc.tir_kernels.cpu.elementwise import APART
from relax_disc.transform.functions import result_types
from relax_disc.transform.fusion.fusion_groups import with_rewritten_blocks
from relax_disc.transform.fusion.kernel_graph import KernelGraph, union
from relax_disc.transform.fusion.producers import CALL_TIR, bytes_of
from relax_disc.vm_builtins.guard import GUARD

# What all joins of a program may keep, so its peak rises by no more at any shape: PyTorch's
# allocator takes memory from a GPU in multiples of this.
MOST_KEPT_BYTES = 2 << 20
# Parameters of a launch take 4 KiB on every architecture and driver, a pointer 8 bytes; some are
# left for sizes.
_MOST_PARAMETERS = 480


@tvm.transform.module_pass(opt_level=0, name="JoinUpdates")
class JoinUpdates:
    """Let one kernel make several updates; after `FuseKernels`."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with joined updates."""
        del ctx
        result = with_rewritten_blocks(mod, _rewritten)
        return mod if result is mod else relax.transform.DeadCodeElimination()(result)


def _rewritten(
    builder: relax.BlockBuilder, mod: tvm.IRModule, function: relax.Function, block: Any
) -> list[relax.Binding] | None:
    """Write a block with its joins; None: there are none."""
    bindings = list(block.bindings)
    joins = list(_Finder(mod, function, bindings).joins())
    return _written(builder, mod, bindings, joins) if joins else None


@dataclass(frozen=True, slots=True)
class _Update:
    """A kernel without reductions, of fixed sizes, whose results only leave the function."""

    place: int
    kept: dict[relax.Var, int]  # what the block makes for it, in bytes
    replaced: frozenset[relax.Var]  # parameters of the function that it reads and results replace
    parameters: int  # of its kernel


class _Finder(KernelGraph):
    def __init__(
        self, mod: tvm.IRModule, function: relax.Function, bindings: list[relax.Binding]
    ) -> None:
        super().__init__(mod, function, bindings)
        self._uses = Uses.of(function)
        # What makes no difference to when an update can run.
        self._elements = union(
            1 << place
            for place, binding in enumerate(bindings)
            if isinstance(binding.value, relax.TupleGetItem) or _is_guard(binding.value)
        )
        self._written = {function.params[k] for k in replaced_parameters(function).values()}

    def joins(self) -> Iterator[list[int]]:
        """Yield places of updates that become one kernel, each in order."""
        ready: dict[int, list[_Update]] = {}  # by the kernels that they need
        for place in range(len(self._bindings)):
            if update := self._update(place):
                ready.setdefault(self._before[place] & ~self._elements, []).append(update)
        kept: dict[relax.Var, int] = {}
        small = []
        for together in sorted(ready.values(), key=_bytes_kept):
            more = {value: size for update in together for value, size in update.kept.items()}
            if sum((kept | more).values()) <= MOST_KEPT_BYTES:
                kept |= more
                small += together
            else:  # each has to wait for what the others need, too
                yield from _launches(together)
        yield from _launches(sorted(small, key=lambda update: update.place))

    def _update(self, place: int) -> _Update | None:
        binding = self._bindings[place]
        call = binding.value
        if not isinstance(call, relax.Call) or call.op != CALL_TIR or len(call.args) != 2:
            return None
        kernel, operands = self._mod[call.args[0]], list(call.args[1].fields)
        read = {self._stored_of(x) for x in operands if isinstance(x, relax.Var)}
        replaced = read & self._written
        if place in self._views or not replaced or not self._only_leaves(binding.var):
            return None
        made = {x: bytes_of(x) for x in read if x in self._place}
        kept = {x: n.as_int() for x, n in made.items() if n is not None and n.is_constant}
        if len(kept) < len(made) or not _is_plain(kernel):
            return None
        return _Update(place, kept, frozenset(replaced), len(kernel.params))

    def _only_leaves(self, variable: relax.Var) -> bool:
        """Whether nothing but the function's result reads a value or its elements."""
        return all(
            isinstance(value, relax.Tuple | relax.Var)
            if user is None or isinstance(value, relax.Tuple | relax.Var)
            else isinstance(value, relax.TupleGetItem) and self._only_leaves(user)
            for user, value in self._uses.users_of(variable)
        )


def _bytes_kept(updates: Sequence[_Update]) -> int:
    return sum({x: size for update in updates for x, size in update.kept.items()}.values())


def _is_guard(value: relax.Expr) -> bool:
    """Whether hyper-parameters of a group are made here, each group's of the same loss."""
    function: Any = value.args[0] if isinstance(value, relax.Call) and value.args else None
    return isinstance(function, relax.ExternFunc) and function.global_symbol == GUARD


def _is_plain(kernel: tirx.PrimFunc) -> bool:
    """Whether a kernel has fixed sizes and no reduction."""
    extents = [size for x in kernel.params for size in getattr(x, "shape", (None,))]
    if not all(isinstance(size, tirx.IntImm) for size in extents):
        return False
    read = read_stages(kernel)
    return read is not None and all(stage.combiner is None for stage in read.stages)


def _launches(updates: Sequence[_Update]) -> Iterator[list[int]]:
    """Split updates, in order, into joins that a launch can take."""
    places: list[int] = []
    taken: set[relax.Var] = set()
    parameters = 0
    for update in updates:
        if taken & update.replaced:
            continue  # no order is between the updates of a launch: none reads what another writes
        if parameters + update.parameters > _MOST_PARAMETERS:
            yield from [places] if len(places) > 1 else []
            places, taken, parameters = [], set(), 0
        places.append(update.place)
        taken |= update.replaced
        parameters += update.parameters
    yield from [places] if len(places) > 1 else []


def _written(
    builder: relax.BlockBuilder,
    mod: tvm.IRModule,
    bindings: list[relax.Binding],
    joins: Iterable[Sequence[int]],
) -> list[relax.Binding]:
    """Write a block anew: each join where its last update was, its results after it."""
    moved: dict[relax.Var, list[relax.Binding]] = {}  # elements of results, by the call
    new: dict[int, list[relax.Binding]] = {}
    for binding in bindings:
        if isinstance(binding.value, relax.TupleGetItem):
            moved.setdefault(binding.value.tuple_value, []).append(binding)
    gone: set[relax.Var] = set()
    for places in joins:
        calls: list[Any] = [bindings[place].value for place in places]
        kernel = builder.add_func(_joined([mod[call.args[0]] for call in calls], calls), "updates")
        operands = [x for call in calls for x in call.args[1].fields]
        types = [kind for call in calls for kind in result_types(call)]
        call = builder.normalize(relax.call_tir(kernel, operands, out_ty=types))
        together = relax.DataflowVar(f"{bindings[places[0]].var.name}_results", call.ty)
        made: list[relax.Binding] = [relax.VarBinding(together, call, bindings[places[-1]].span)]
        first = 0
        for place in places:
            made += _results(bindings[place], together, first, moved)
            first += len(result_types(bindings[place].value))
            gone |= {binding.var for binding in moved.get(bindings[place].var, ())}
            new[place] = []
        new[places[-1]] = made
    result = []
    for place, binding in enumerate(bindings):
        result += new.get(place, [] if binding.var in gone else [binding])
    return result


def _results(
    binding: relax.Binding,
    together: relax.Var,
    first: int,
    moved: dict[relax.Var, list[relax.Binding]],
) -> list[relax.Binding]:
    """Bind what a call was bound to, or its elements, to elements of the joined results."""
    if isinstance(binding.var.ty, relax.TensorType):
        return [relax.VarBinding(binding.var, relax.TupleGetItem(together, first), binding.span)]
    return [
        relax.VarBinding(x.var, relax.TupleGetItem(together, first + x.value.index), x.span)
        for x in moved.get(binding.var, ())
    ]


def _joined(kernels: Sequence[tirx.PrimFunc], calls: Sequence[Any]) -> tirx.PrimFunc:
    """Run kernels one after the other in one function: what all read, then what all write."""
    read: list[Any] = []
    written: list[Any] = []
    overlaid: list[tuple[Any, Any]] = []
    names = [call.args[0].name_hint for call in calls]
    proven = {name: inplace_pairs(k) for name, k in dict(zip(names, kernels, strict=True)).items()}
    scratch: list[Any] = []
    body: list[Any] = []
    for name, kernel, call in zip(names, kernels, calls, strict=True):
        own = s_tir.renew_defs(kernel)
        results = len(result_types(call))
        # Of its own operands only: no order is between the updates.
        overlaid += [(own.params[a], own.params[b]) for a, b in proven[name]]
        read += own.params[:-results]
        written += own.params[-results:]
        block = own.body.block
        scratch += block.alloc_buffers
        body += block.body.seq if isinstance(block.body, tirx.SeqStmt) else [block.body]
    root = s_tir.SBlock([], [], [], "root", tirx.SeqStmt(body), alloc_buffers=scratch)
    like = kernels[0]
    func = tirx.PrimFunc(
        [*read, *written], s_tir.SBlockRealize([], True, root), like.ret_type, like.attrs
    )
    place = {param: index for index, param in enumerate(func.params)}
    pairs = [[place[a], place[b]] for a, b in overlaid]
    apart = [len(result_types(call)) for call in calls]
    return func.with_attrs({APART: apart, INPLACE_ATTRIBUTE: pairs})
