"""Which operators TVM's `FuseOps` puts into one kernel.

`FuseOps` gives its variables new names, and functions that are alike become one; here each call of
the fused function is matched with the bindings of the function before fusion that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir, relax, tirx
from tvm.tirx.analysis import undefined_vars
from tvm_ffi import structural_hash

from relax_disc.transform.functions import (
    block_like,
    copy_module,
    pass_context,
    program_functions,
    with_blocks,
)

OPAQUE = 8  # TVM's kind of a kernel that fuses with none

# Operators in one kernel, where the context does not say it. Each may be inlined into the next, and
# what walks an expression goes down by some 40 KB of stack for each: TVM's 256 are too many.
_MOST_OPERATORS = 96
_MAX_DEPTH = "relax.FuseOps.max_depth"


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """Operators that became one kernel."""

    result: relax.Var  # what the kernel's call is bound to in the fused function
    bindings: tuple[relax.Binding, ...]  # the operators, as they were before fusion, in order


def fuse_ops(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[ir.GlobalVar, list[FusionGroup]]]:
    """Run `FuseOps`; return its module, and for each program the groups that it made."""
    with pass_context({_MAX_DEPTH: most_operators()}):
        fused = relax.transform.FuseOps()(_fills_alone(mod))
    groups = {
        variable: _Matcher(function).groups(fused, fused[variable.name_hint])
        for variable, function in program_functions(mod)
    }
    return fused, groups


def most_operators() -> int:
    """Return the most operators that one kernel is made of."""
    context: Any = tvm.transform.PassContext.current()
    return int(context.config.get(_MAX_DEPTH, _MOST_OPERATORS))


def _fills_alone(mod: tvm.IRModule) -> tvm.IRModule:
    """Keep kernels out of fusion that fill a compound extent (``20*s``) from nothing of it.

    They take the dim as a number; `FuseTIR` of TVM 0.27 defines it twice and fails.
    """
    result = copy_module(mod)
    for variable, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc) and fills_compound(function):
            result.update_func(variable, function.with_attr("op_pattern", OPAQUE))
    return result


def fills_compound(function: tirx.PrimFunc) -> bool:
    """Whether a kernel fills a compound extent from nothing of it; such a one is not fused."""
    kinds = [isinstance(parameter.ty, ir.PrimType) for parameter in function.params]
    if True not in kinds:
        return False
    first = kinds.index(True)  # tensors that are read stand before the numbers, others behind
    read, written = function.params[:first], function.params[first:]
    known = {v for extent in _extents(read) for v in undefined_vars(extent)}
    compound = [extent for extent in _extents(written) if not isinstance(extent, tirx.Var)]
    return any(v not in known for extent in compound for v in undefined_vars(extent))


def _extents(parameters: Any) -> list[Any]:
    return [extent for each in parameters for extent in getattr(each, "shape", ())]


class _Matcher:
    """Finds the bindings of a function from before fusion that a kernel stands for.

    A value is known by what computes it of which values; of several bindings that compute the same
    of the same, each is found once.
    """

    def __init__(self, function: relax.Function) -> None:
        self._made: dict[Any, list[relax.Binding]] = {}
        self._same: dict[Any, Any] = {}  # variables -> the first one of that value
        for block in blocks_of(function):
            for binding in block.bindings:
                key = _key(binding.value, self._same)
                if key is not None:
                    self._made.setdefault(key, []).append(binding)
                    self._same[binding.var] = self._made[key][0].var
        self._left = {key: list(made) for key, made in self._made.items()}

    def groups(self, mod: tvm.IRModule, function: relax.Function) -> list[FusionGroup]:
        """Match a fused function (`FuseOps` before `FuseTIR`), once.

        A call that fusion left alone is a group of one; what has no counterpart is left out.
        """
        found: list[FusionGroup] = []
        same: dict[Any, Any] = {}  # variables of the fused function -> those of the first
        for block in blocks_of(function):
            for binding in block.bindings:
                group = _group_of(mod, binding.value)
                if group is None:
                    parts, inner, result = [binding], same, binding.var
                else:
                    parts, result = list(blocks_of(group)[0].bindings), group.body.body
                    arguments = (same.get(a, a) for a in binding.value.args)
                    inner = dict(zip(group.params, arguments, strict=True))
                members = []
                for part in parts:
                    key = _key(part.value, inner)
                    if key in self._made:
                        inner[part.var] = self._made[key][0].var
                        left = self._left[key]
                        members.append(left.pop(0) if len(left) > 1 else left[0])
                if result in inner:
                    same[binding.var] = inner[result]
                if members:
                    found.append(FusionGroup(binding.var, tuple(members)))
        return found


def blocks_of(function: relax.Function) -> list[relax.BindingBlock]:
    """List the blocks of a function's body."""
    return list(function.body.blocks) if isinstance(function.body, relax.SeqExpr) else []


def with_rewritten_blocks(
    mod: tvm.IRModule,
    rewrite: Callable[[relax.BlockBuilder, tvm.IRModule, relax.Function, Any], Any],
) -> tvm.IRModule:
    """Return the module with other bindings in some blocks; the same module if there are none.

    ``rewrite`` takes a builder to add kernels to, the module, a function and one of its blocks; it
    returns the block's bindings, or None to leave it as it is.
    """
    builder = relax.BlockBuilder(copy_module(mod))
    changed: dict[Any, relax.Function] = {}
    for variable, function in program_functions(mod):
        blocks = blocks_of(function)
        for number, block in enumerate(blocks):
            bindings = rewrite(builder, mod, function, block)
            if bindings is not None:
                blocks[number] = block_like(block, bindings)
                changed[variable] = with_blocks(function, blocks)
    if not changed:
        return mod
    result = builder.get()
    for variable, function in changed.items():
        result.update_func(variable, function)
    return relax.transform.Normalize()(result)


def _key(value: relax.Expr, same: dict[Any, Any]) -> Any:
    """What a binding computes, and of which values; None for what is never fused."""
    if isinstance(value, relax.TupleGetItem):
        return value.index, same.get(value.tuple_value, value.tuple_value)
    if not isinstance(value, relax.Call):
        return None
    callee, operands = value.op, value.args
    if len(operands) >= 2 and isinstance(operands[1], relax.Tuple):  # call_tir
        callee, operands = operands[0], operands[1].fields
    return callee, tuple(_operand(same.get(x, x)) for x in operands)


def _operand(operand: Any) -> Any:
    """Know a tensor, a dim or a constant in any function: dims are variables of their own there."""
    if isinstance(operand, relax.Var | tirx.Var):
        return operand.name if isinstance(operand.ty, ir.PrimType) else operand
    return structural_hash(operand) if isinstance(operand, ir.GenericConst) else None


def _group_of(mod: tvm.IRModule, value: relax.Expr) -> relax.Function | None:
    if not (isinstance(value, relax.Call) and isinstance(value.op, ir.GlobalVar)):
        return None
    function = mod[value.op]
    is_group = isinstance(function, relax.Function) and (function.attrs or {}).get("Primitive")
    return function if is_group else None
