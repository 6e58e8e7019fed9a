"""Make again, for readers long after the first, what little work makes of the caller's tensors.

A part of a packed weight, a weight times a norm by row: a library reads it in the forward pass and
again in the backward pass, and in between it lies in memory beside the parameter that it is made
of.  Late readers get a copy of their own, made by the same kernel, just before.  PyTorch keeps
views of such parts, which take nothing, and weights that a parametrization made.

Values are taken whose kernel is element-wise over parameters and much smaller tensors.  Casts are
left alone: under autocast they are all weights, and making them twice shows in the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import tvm
from tvm import relax

from relax_disc.analysis.symbolic.comparison.compare import at_most
from relax_disc.ops.operand_views import Uses, is_call_of, operands_of
from relax_disc.ops.registry import dtype_name
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
    bytes_of,
    kernel_of,
    pattern_of,
    work_of,
)

# Readers so many bindings behind the one before belong to another part of the step.
_LEAST_GAP = 12
# Smaller values are not worth a kernel.
_LEAST_BYTES = 1 << 16
# An operand so much smaller than the value may be kept for the copy.
_SMALL = 8


@tvm.transform.module_pass(opt_level=0, name="RepeatForLateReaders")
class RepeatForLateReaders:
    """Repeat cheap kernels over parameters; run after `InlineProducers`, before fusion."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with repeated bindings; the same module if there are none."""
        del ctx
        groups, result = plan_fusion(mod), copy_module(mod)
        is_changed = False
        for variable, function in program_functions(mod):
            repeats = list(_repeats(mod, function, groups[variable]))
            if repeats:
                result.update_func(variable, _rewritten(function, repeats))
                is_changed = True
        return relax.transform.Normalize()(result) if is_changed else mod


_Repeat = tuple[tuple[relax.Binding, ...], frozenset[relax.Var]]  # kernel's bindings, late readers


def _repeats(
    mod: tvm.IRModule, function: relax.Function, groups: Sequence[FusionGroup]
) -> Iterator[_Repeat]:
    uses, parameters = Uses.of(function), frozenset(function.params)
    bindings = (b for block in blocks_of(function) for b in block.bindings)
    place = {binding.var: number for number, binding in enumerate(bindings)}
    for group in groups:
        if not _is_cheap(mod, group.bindings, parameters):
            continue
        users = uses.users_of(group.bindings[-1].var)
        if not all(v in place and _takes_tensors(call) for v, call in users):
            continue
        places = sorted({place[v] for v, _ in users if v is not None})
        gaps = [after - before for before, after in pairwise(places)]
        if gaps and max(gaps) >= _LEAST_GAP:
            first = places[gaps.index(max(gaps)) + 1]
            late = frozenset(v for v, _ in users if v is not None and place[v] >= first)
            yield group.bindings, late


def _is_cheap(
    mod: tvm.IRModule, made: tuple[relax.Binding, ...], parameters: frozenset[relax.Var]
) -> bool:
    value = made[-1].var
    size = bytes_of(value) if isinstance(value.ty, relax.TensorType) else None
    if not isinstance(value, relax.DataflowVar) or size is None:
        return False
    if size.is_constant and at_most(size, size.constant(_LEAST_BYTES)):
        return False
    if not all(pattern_of(mod, b.value) <= INJECTIVE for b in made):
        return False
    if all(is_reshape(kernel_of(mod, b.value)) for b in made):
        return False
    if sum(work_of(mod, b.value) for b in made) > MOST_WORK:
        return False
    inside = {b.var for b in made}
    for operand in {x for b in made for x in operands_of(b.value)} - inside:
        bytes_ = bytes_of(operand) if isinstance(operand.ty, relax.TensorType) else None
        if bytes_ is not None and at_most(bytes_ * _SMALL, size):
            continue
        if operand not in parameters or dtype_name(operand.ty) != dtype_name(value.ty):
            return False
    return True


def _takes_tensors(call: relax.Expr) -> bool:
    return is_call_of(call, "relax.call_tir") or is_call_of(call, "relax.call_dps_packed")


def _rewritten(function: relax.Function, repeats: Sequence[_Repeat]) -> relax.Function:
    """Write each copy before the first of its readers, which read it in place of the value."""
    builder = relax.BlockBuilder()
    of_reader: dict[relax.Var, list[tuple[relax.Binding, ...]]] = {}
    for made, late in repeats:
        for reader in late:
            of_reader.setdefault(reader, []).append(made)
    copies: dict[relax.Var, relax.Var] = {}

    def changed(call: relax.Call, names: dict[relax.Var, relax.Var]) -> relax.Expr:
        fields = relax.Tuple([names.get(x, x) for x in call.args[1].fields])
        arguments = [call.args[0], fields, *call.args[2:]]
        made = relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)
        return builder.normalize(made)

    def written(binding: relax.Binding) -> Iterator[relax.Binding]:
        names: dict[relax.Var, relax.Var] = {}
        for made in of_reader.get(binding.var, ()):
            value = made[-1].var
            if value not in copies:
                inner: dict[relax.Var, relax.Var] = {}
                for part in made:
                    inner[part.var] = relax.DataflowVar(f"{part.var.name}_late", part.var.ty)
                    call = changed(part.value, inner)
                    yield relax.VarBinding(inner[part.var], call, part.span)
                copies[value] = inner[value]
            names[value] = copies[value]
        if names:
            value = changed(binding.value, names)
            yield relax.VarBinding(binding.var, value, binding.span)
        else:
            yield binding

    blocks = [
        block_like(block, [new for binding in block.bindings for new in written(binding)])
        for block in blocks_of(function)
    ]
    return with_blocks(function, blocks)
