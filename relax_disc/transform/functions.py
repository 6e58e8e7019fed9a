"""What several passes do with modules and their functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.sym.analyzer import Analyzer

from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.analysis.kernels.stages import is_buffer
from relax_disc.analysis.symbolic.from_tirx import elements
from relax_disc.errors import GraphError
from relax_disc.ops.operand_views import operands_of
from relax_disc.ops.reshape import IS_RESHAPE


def pass_context(config: Mapping[str, Any]) -> tvm.transform.PassContext:
    """Make the current context with other entries in its configuration."""
    now: Any = tvm.transform.PassContext.current()
    return tvm.transform.PassContext(
        opt_level=now.opt_level,
        required_pass=now.required_pass,
        disabled_pass=now.disabled_pass,
        instruments=now.instruments,
        config={**dict(now.config), **config},
    )


def copy_module(mod: tvm.IRModule, functions: Mapping[Any, Any] | None = None) -> tvm.IRModule:
    """Return a module with the same functions, or others; its changes do not reach the first."""
    functions = dict(mod.functions_items()) if functions is None else functions
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def program_functions(mod: tvm.IRModule) -> Iterator[tuple[tvm.ir.GlobalVar, relax.Function]]:
    """Yield the Relax functions that are programs and not parts of one (fused groups)."""
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            attrs = function.attrs or {}
            if not any(attrs.get(name) for name in ("Primitive", "Codegen", "Composite")):
                yield variable, function


@functools.lru_cache(maxsize=1024)
def is_reshape(kernel: tirx.PrimFunc) -> bool:
    """Whether a kernel only gives its operand another shape, for which no kernel need run.

    TVM's own test takes the first rows of a table for a reshape as well, and milliseconds; several
    passes ask about the same kernels.
    """
    buffers = [param for param in kernel.params if is_buffer(param)]
    if len(buffers) != 2:
        return False
    if kernel.attrs and IS_RESHAPE in kernel.attrs:
        return True
    with contextlib.suppress(GraphError):  # no polynomial
        if elements(buffers[0].shape) != elements(buffers[1].shape):
            return False
    # It raises where it cannot divide by an extent such as `n // 2 + n`: then a kernel runs.
    with contextlib.suppress(tvm.error.InternalError):
        return relax.analysis.has_reshape_pattern(kernel)
    return False


def at_span(call: relax.Call, span: tvm.ir.Span | None) -> relax.Call:
    """Return the call with another span: the line of the user's model that it stems from."""
    return relax.Call(call.op, call.args, call.attrs, call.ty_args, span)


def with_blocks(
    function: relax.Function, blocks: Sequence[relax.BindingBlock], result: Any = None
) -> relax.Function:
    """Return the function with other blocks of bindings, and another result where one is given."""
    result = function.body.body if result is None else result
    body = relax.SeqExpr(list(blocks), result, function.body.span)
    kept = function.params, body, function.ret_ty, function.is_pure
    return relax.Function(*kept, attrs=function.attrs, span=function.span)


def block_like(block: relax.BindingBlock, bindings: Sequence[relax.Binding]) -> relax.BindingBlock:
    """Return a block of the same kind with other bindings."""
    if isinstance(block, relax.DataflowBlock):
        return relax.DataflowBlock(list(bindings))
    return relax.BindingBlock(list(bindings))


def without_unused(function: relax.Function) -> relax.Function:
    """Drop bindings of dataflow blocks that nothing uses; numbers and checks of shapes stay.

    TVM's `DeadCodeElimination` does more, and takes time with the square of a block's length.
    """
    if not isinstance(function.body, relax.SeqExpr):
        return function
    used = set(operands_of(function.body.body))
    blocks = []
    for block in reversed(list(function.body.blocks)):
        kept = []
        for binding in reversed(list(block.bindings)):
            if _is_needed(binding, used):
                kept.append(binding)
                used.update(operands_of(binding.value))
        blocks.append(type(block)(kept[::-1], block.span))
    return with_blocks(function, blocks[::-1])


def _is_needed(binding: relax.Binding, used: set[relax.Var]) -> bool:
    if isinstance(binding, relax.MatchCast) or not isinstance(binding.var, relax.DataflowVar):
        return True
    return binding.var in used or isinstance(binding.var.ty, tvm.ir.PrimType)


def result_types(call: Any) -> list[relax.Type]:
    """Types of the tensors that a `call_tir` makes."""
    kind = call.ty_args[0]
    return list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]


def size_meanings(kernel: tirx.PrimFunc, call: Any) -> dict[Any, Any]:
    """What a kernel's dims and integers stand for in a `call_tir` of it, in the caller's dims."""
    meanings: dict[Any, Any] = {}
    operands = [*call.args[1].fields, *result_types(call)]
    for parameter, operand in zip(kernel.params, operands, strict=False):
        kind: Any = operand if isinstance(operand, relax.TensorType) else operand.ty
        if not isinstance(kind, relax.TensorType):
            meanings[parameter] = operand
        elif isinstance(kind.shape, relax.ShapeExpr):
            pairs = zip(parameter.shape, kind.shape.values, strict=True)
            meanings.update((a, b) for a, b in pairs if isinstance(a, tirx.Var))
    return meanings


def size_misfit(kernel: tirx.PrimFunc, call: Any) -> str | None:
    """Say where the sizes that a `call_tir` gives are not those of its tensors; None: nowhere.

    The kernel's loops would leave elements out, or pass their end.
    """
    analyzer, sizes = Analyzer(), size_meanings(kernel, call)
    operands = [*call.args[1].fields, *result_types(call)]
    for parameter, operand in zip(kernel.params, operands, strict=False):
        kind: Any = operand if isinstance(operand, relax.TensorType) else operand.ty
        if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
            continue
        for extent, size in zip(parameter.shape, kind.shape.values, strict=True):
            given = substitute_sizes(extent, sizes)
            if not analyzer.can_prove_equal(given, size):
                name = call.args[0].name_hint
                return f"the kernel {name} has {given} rows where its tensor has {size}"
    return None


def substitute_sizes(expr: Any, meanings: Mapping[Any, Any]) -> Any:
    """Replace dims, in an expression or throughout a kernel and the shapes of its buffers."""

    def replace(var: Any, mutator: Any) -> Any:
        return meanings[var] if var in meanings else mutator.default_mutate(var)

    return mutate(expr, (tirx.Var, replace))
