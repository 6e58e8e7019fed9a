"""What several passes do with modules and their functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tvm
from tvm import relax


def copy_module(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module with the same functions, whose changes do not reach the first."""
    return tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)


def program_functions(mod: tvm.IRModule) -> Iterator[tuple[tvm.ir.GlobalVar, relax.Function]]:
    """Yield the Relax functions that are programs and not parts of one (fused groups)."""
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            attrs = function.attrs or {}
            if not any(attrs.get(name) for name in ("Primitive", "Codegen", "Composite")):
                yield variable, function


def at_span(call: relax.Call, span: tvm.ir.Span | None) -> relax.Call:
    """Return the call with another span: the line of the user's model that it stems from."""
    return relax.Call(call.op, call.args, call.attrs, call.ty_args, span)


def with_blocks(function: relax.Function, blocks: Sequence[relax.BindingBlock]) -> relax.Function:
    """Return the function with other blocks of bindings."""
    body = relax.SeqExpr(list(blocks), function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def block_like(block: relax.BindingBlock, bindings: Sequence[relax.Binding]) -> relax.BindingBlock:
    """Return a block of the same kind with other bindings."""
    if isinstance(block, relax.DataflowBlock):
        return relax.DataflowBlock(list(bindings))
    return relax.BindingBlock(list(bindings))
