"""Give kernels their scratch memory as arguments, so that the plan places and counts it.

A buffer that a kernel allocates for itself bypasses the arena: TVM takes it from a pool of its own
that never shrinks.  Here it becomes one more result of the kernel that nobody reads.

Limits: buffers of the kernel's outermost block, where all threads see them; on the CPU smaller ones
of constant size, and those inside loops, stay where they are. On a GPU any would be allocated, and
waited for, at each launch.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import tvm
from tvm import relax, s_tir, tirx

from relax_disc.analysis.kernels.stages import nodes_of
from relax_disc.ops.registry import itemsize
from relax_disc.transform.functions import (
    copy_module,
    program_functions,
    result_types,
    size_meanings,
    substitute_sizes,
    with_blocks,
)

_LEAST_BYTES = 1 << 16
"""Constant buffers below this are left: a few kilobytes for each thread, kept warm in its cache."""


@tvm.transform.module_pass(opt_level=0, name="HoistWorkspace")
class HoistWorkspace:
    """Turn large buffers that kernels allocate into results that nobody reads."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with such kernels and their calls changed."""
        del ctx
        target = tvm.target.Target.current(allow_none=True)
        least = _LEAST_BYTES if target is None or target.kind.name == "llvm" else 0
        hoisted = {
            variable: buffers
            for variable, function in mod.functions_items()
            if isinstance(function, tirx.PrimFunc) and (buffers := _buffers(function, least))
        }
        for variable in _otherwise_used(mod, hoisted):
            del hoisted[variable]
        if not hoisted:
            return mod
        result = copy_module(mod)
        renewed: dict[Any, tvm.ir.GlobalVar] = {}
        for variable, buffers in hoisted.items():
            wider = _with_parameters(mod[variable], buffers)
            renewed[variable] = tvm.ir.GlobalVar(variable.name_hint)  # it carries the new type
            relax.expr._update_type(renewed[variable], wider.ty)
            del result[variable]
            result.update_func(renewed[variable], wider)
        for variable, function in program_functions(mod):
            if isinstance(function.body, relax.SeqExpr):
                result.update_func(variable, _rewrite_calls(mod, function, hoisted, renewed))
        return relax.transform.Normalize()(result)


def _buffers(function: tirx.PrimFunc, least_bytes: int) -> list[Any]:
    body: Any = function.body
    if not isinstance(body, s_tir.SBlockRealize):
        return []
    found = []
    for buffer in body.block.alloc_buffers:
        if buffer.scope() != "global":
            continue
        extents = list(buffer.shape)
        is_constant = all(isinstance(extent, tirx.IntImm) for extent in extents)
        size = prod(int(extent.value) for extent in extents) if is_constant else None
        if size is None or size * itemsize(str(buffer.dtype)) >= least_bytes:
            found.append(buffer)
    return found


def _otherwise_used(mod: tvm.IRModule, hoisted: dict[Any, list[Any]]) -> set[Any]:
    """Kernels with a use that is no `call_tir` from which the buffers' shapes are known."""
    uses: Counter[Any] = Counter()

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, tvm.ir.GlobalVar) and expr in hoisted:
            uses[expr] += 1

    for _, function in mod.functions_items():
        if not isinstance(function, relax.Function):
            continue
        relax.analysis.post_order_visit(function, visit)
        for block in getattr(function.body, "blocks", ()):
            for binding in block.bindings:
                call = binding.value
                if _is_call(call, hoisted) and _workspace_types(mod, call, hoisted) is not None:
                    uses[call.args[0]] -= 1
    return {variable for variable, count in uses.items() if count}


def _is_call(expr: Any, hoisted: dict[Any, list[Any]]) -> bool:
    return (
        isinstance(expr, relax.Call)
        and isinstance(expr.op, tvm.ir.Op)
        and expr.op.name == "relax.call_tir"
        and expr.args[0] in hoisted
    )


def _workspace_types(
    mod: tvm.IRModule, call: Any, hoisted: dict[Any, list[Any]]
) -> list[Any] | None:
    """Types of a call's workspace in the caller's dims; None if they cannot be told."""
    meanings = size_meanings(mod[call.args[0]], call)
    types = []
    for buffer in hoisted[call.args[0]]:
        if any(dim not in meanings for dim in nodes_of(tirx.Var, list(buffer.shape))):
            return None
        shape = [substitute_sizes(extent, meanings) for extent in buffer.shape]
        types.append(relax.TensorType(shape, str(buffer.dtype)))
    return types


def _rewrite_calls(
    mod: tvm.IRModule,
    function: relax.Function,
    hoisted: dict[Any, list[Any]],
    renewed: dict[Any, tvm.ir.GlobalVar],
) -> relax.Function:
    blocks = []
    for block in function.body.blocks:
        kind = relax.DataflowVar if isinstance(block, relax.DataflowBlock) else relax.Var
        bindings: list[Any] = []
        for binding in block.bindings:
            call: Any = binding.value
            if not _is_call(call, hoisted):
                bindings.append(binding)
                continue
            results = result_types(call)
            extra = _workspace_types(mod, call, hoisted)
            assert extra is not None
            whole_type = relax.TupleType([*results, *extra])
            whole = kind(f"{binding.var.name}_with_workspace", whole_type)
            arguments = [renewed[call.args[0]], *list(call.args)[1:]]
            wider = relax.Call(call.op, arguments, call.attrs, [whole_type], call.span)
            bindings.append(relax.VarBinding(whole, wider))
            parts = [relax.TupleGetItem(whole, i) for i in range(len(results))]
            if len(parts) == 1 and not isinstance(call.ty_args[0], relax.TupleType):
                bindings.append(relax.VarBinding(binding.var, parts[0]))
                continue
            names: list[Any] = [
                kind(f"{binding.var.name}_{i}", part) for i, part in enumerate(results)
            ]
            bindings += [relax.VarBinding(n, p) for n, p in zip(names, parts, strict=True)]
            bindings.append(relax.VarBinding(binding.var, relax.Tuple(names)))
        blocks.append(type(block)(bindings))
    return with_blocks(function, blocks)


def _with_parameters(function: tirx.PrimFunc, buffers: list[Any]) -> tirx.PrimFunc:
    realize: Any = function.body
    block = realize.block
    kept = [buffer for buffer in block.alloc_buffers if buffer not in buffers]
    root = s_tir.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        block.body,
        block.init,
        kept,
        block.match_buffers,
        block.annotations,
    )
    body = s_tir.SBlockRealize(realize.iter_values, realize.predicate, root)
    return tirx.PrimFunc(
        [*function.params, *buffers], body, function.ret_type, function.attrs, function.span
    )
