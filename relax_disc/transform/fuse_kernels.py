"""TVM's fusion of kernels, keeping the lines of the user's model.

`FuseOps` moves operators into functions of their own and calls those; the call has no line, and
functions that are alike become one, so that the lines inside are those of its first use.  Here each
call is matched with the bindings that it replaced: it takes the line of the one that made its
result.  That line is what a memory report or an error names.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from relax_disc.transform.functions import at_span, block_like, program_functions, with_blocks


@tvm.transform.module_pass(opt_level=0, name="FuseKernels")
class FuseKernels:
    """`FuseOps` and `FuseTIR`; calls of fused kernels have the span of what they compute."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with fused kernels."""
        del ctx
        grouped = relax.transform.FuseOps()(mod)
        spans: dict[Any, Any] = {}
        for variable, function in program_functions(mod):
            spans.update(_Matcher(function).spans(grouped, grouped[variable.name_hint]))
        result = relax.transform.FuseTIR()(grouped)
        for variable, function in program_functions(result):
            blocks = [
                block_like(block, [_located(binding, spans) for binding in block.bindings])
                for block in _blocks(function)
            ]
            if blocks:
                result.update_func(variable, with_blocks(function, blocks))
        return relax.transform.Normalize()(result)


class _Matcher:
    """Finds the bindings of a function from before fusion that a group stands for.

    A binding is known by what it computes of which variables; of several that compute the same of
    the same, each is found once.
    """

    def __init__(self, function: relax.Function) -> None:
        self._made: dict[Any, list[relax.Binding]] = {}
        for block in _blocks(function):
            for binding in block.bindings:
                key = _key(binding.value, {})
                if key is not None:
                    self._made.setdefault(key, []).append(binding)

    def spans(self, mod: tvm.IRModule, function: relax.Function) -> dict[Any, Any]:
        """Return the span of each variable that a call of a group is bound to."""
        found: dict[Any, Any] = {}
        same: dict[Any, Any] = {}  # variables of the fused function -> those of the first
        for block in _blocks(function):
            for binding in block.bindings:
                group = _group_of(mod, binding.value)
                if group is None:  # fusion may give what stays alone another variable, too
                    twin = self._twin(binding.value, same)
                    if twin is not None:
                        same[binding.var] = twin.var
                    continue
                inner = dict(
                    zip(group.params, (same.get(a, a) for a in binding.value.args), strict=True)
                )
                span = None
                for part in _blocks(group)[0].bindings:
                    twin = self._twin(part.value, inner)
                    if twin is not None:
                        inner[part.var] = twin.var
                        span = _span_of(twin) or span
                if span is not None:
                    found[binding.var] = span
                result = group.body.body
                if result in inner:
                    same[binding.var] = inner[result]
        return found

    def _twin(self, value: relax.Expr, names: dict[Any, Any]) -> relax.Binding | None:
        """Take a binding of the first function that computes the same of the same."""
        known = self._made.get(_key(value, names))
        if not known:
            return None
        return known.pop(0) if len(known) > 1 else known[0]


def _key(value: relax.Expr, names: dict[Any, Any]) -> Any:
    """What a binding computes, and of which variables; None for what is never fused."""
    if isinstance(value, relax.TupleGetItem):
        return value.index, names.get(value.tuple_value, value.tuple_value)
    if not isinstance(value, relax.Call):
        return None
    callee, operands = value.op, value.args
    if len(operands) == 2 and isinstance(operands[1], relax.Tuple):  # call_tir
        callee, operands = operands[0], operands[1].fields
    variables = tuple(names.get(x, x) for x in operands if isinstance(x, relax.Var))
    return callee, variables


def _blocks(function: relax.Function) -> list[relax.BindingBlock]:
    return list(function.body.blocks) if isinstance(function.body, relax.SeqExpr) else []


def _group_of(mod: tvm.IRModule, value: relax.Expr) -> relax.Function | None:
    if not (isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar)):
        return None
    function = mod[value.op]
    is_group = isinstance(function, relax.Function) and (function.attrs or {}).get("Primitive")
    return function if is_group else None


def _span_of(binding: relax.Binding) -> Any:
    return getattr(binding.value, "span", None) or binding.var.span


def _located(binding: relax.Binding, spans: dict[Any, Any]) -> relax.Binding:
    span, value = spans.get(binding.var), binding.value
    if span is None or not isinstance(value, relax.Call) or value.span is not None:
        return binding
    return relax.VarBinding(binding.var, at_span(value, span), span)
