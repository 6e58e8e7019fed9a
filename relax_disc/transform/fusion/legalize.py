"""Operators to kernels; of calls that are alike the kernel is made once.

Where many tensors are joined the kernel is another than TVM's: `concatenation`.

Layers repeat, so most calls of a step are like an earlier one: same operator and attributes,
operands of the same types.  TVM's `LegalizeOps` makes a kernel for each, finds it among those that
it has, and throws it away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax

from relax_disc.transform.functions import program_functions
from relax_disc.transform.fusion.concatenation import joining_rules
from relax_disc.transform.fusion.fusion_groups import blocks_of

_CALL_TIR = ir.Op.get("relax.call_tir")
_Rule = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


@tvm.transform.module_pass(opt_level=0, name="Legalize")
class Legalize:
    """`LegalizeOps`, with the same result but for many tensors that are joined."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with kernels in place of operators."""
        del ctx
        operators = {
            binding.value.op
            for _, function in program_functions(mod)
            for block in blocks_of(function)
            for binding in block.bindings
            if isinstance(binding.value, relax.Call) and isinstance(binding.value.op, ir.Op)
        }
        attributes = {op.name: op.get_attr("FLegalize") for op in operators}
        rules: Any = {name: rule for name, rule in attributes.items() if rule is not None}
        known: dict[Any, Any] = {}
        once = {name: _once(rule, known) for name, rule in (rules | joining_rules(rules)).items()}
        return relax.transform.LegalizeOps(once)(mod)


def _once(rule: _Rule, known: dict[Any, Any]) -> _Rule:
    """Make the rule that asks another one only for calls that are like none before."""

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        tensors: list[relax.Expr] = []
        kinds = [_kind(argument, tensors) for argument in call.args[:]]
        same = tuple(next(k for k, y in enumerate(tensors) if y.same_as(x)) for x in tensors)
        key = tvm_ffi.StructuralKey([call.op, call.attrs, call.ty_args, kinds]), same
        if key not in known:
            made = rule(builder, call)
            known[key] = _pattern(made, tensors)
            return made
        pattern = known[key]
        if pattern is None:
            return rule(builder, call)
        made, places = pattern
        operands = [tensors[x] if isinstance(x, int) else x for x in places]
        arguments = [made.args[0], relax.Tuple(operands), *made.args[2:]]
        return relax.Call(made.op, arguments, made.attrs, made.ty_args, made.span)

    return legalize


def _kind(argument: Any, tensors: list[relax.Expr]) -> Any:
    """What of an argument its kernel depends on; note its tensors."""
    if isinstance(argument, relax.Tuple):
        return [_kind(field, tensors) for field in argument.fields[:]]
    if isinstance(argument.ty, relax.TensorType):
        tensors.append(argument)
        if isinstance(argument, relax.Var):
            return argument.ty
    return argument


def _pattern(made: Any, tensors: list[relax.Expr]) -> tuple[Any, list[Any]] | None:
    """Describe a kernel's call by the places of its operands; None where it is something else."""
    if not isinstance(made, relax.Call) or made.op != _CALL_TIR:
        return None
    places: list[Any] = []
    for operand in made.args[1].fields[:]:
        found = [k for k, tensor in enumerate(tensors) if tensor.same_as(operand)]
        if not found and not isinstance(operand.ty, ir.PrimType):
            return None  # the result of another kernel
        places.append(found[0] if found else operand)
    return made, places
