"""Values that depend on no input, computed once: all their kernels are compiled together.

TVM's `FoldConstant` compiles each kernel by itself, for 0.2 s.  A loop that a model unrolls has
hundreds of them, the positions and masks of its steps.  Here they become constants first; that pass
then puts these in the place of the variables, and has nothing left to compile.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.target import Target

from relax_disc.transform.functions import block_like, copy_module, program_functions, with_blocks
from relax_disc.transform.fusion.fusion_groups import blocks_of
from relax_disc.transform.schedule_kernels import LOWERING_FAILURES

_logger = logging.getLogger(__name__)

_MOST_CREATED = 1024
"""Elements of a tensor that is made of nothing: larger ones are cheaper to make than to keep."""

_TARGET = Target({"kind": "llvm", "opt-level": 0})


@tvm.transform.module_pass(opt_level=0, name="FoldConstants")
class FoldConstants:
    """Bind variables that depend on no input to constants."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with those bindings; as it is, where a kernel of them has no code."""
        del ctx
        found = {var: _foldable(mod, func) for var, func in program_functions(mod)}
        kernels = {call.args[0] for calls in found.values() for call in calls.values()}
        if not kernels:
            return mod
        try:
            compiled = _compiled(mod, sorted(kernels, key=lambda var: var.name_hint))
        except LOWERING_FAILURES as error:
            _logger.info("constants are folded one by one: %s", error)
            return mod
        functions = dict(mod.functions_items())
        for var, calls in found.items():
            if calls:
                functions[var] = _folded(functions[var], calls, compiled)
        return copy_module(mod, functions)


def _foldable(mod: tvm.IRModule, func: relax.Function) -> dict[relax.Var, relax.Call]:
    """Find the calls of kernels that depend on no input, in order, by their variables."""
    known: set[relax.Var] = set()
    calls: dict[relax.Var, relax.Call] = {}
    for binding in (x for block in blocks_of(func) for x in block.bindings):
        value: Any = binding.value
        if not isinstance(binding, relax.VarBinding):
            continue
        if isinstance(value, tvm.ir.GenericConst):
            known.add(binding.var)
        elif _is_foldable(mod, value, known):
            known.add(binding.var)
            calls[binding.var] = value
    return calls


def _is_foldable(mod: tvm.IRModule, value: Any, known: set[relax.Var]) -> bool:
    if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != "relax.call_tir":
        return False
    kernel, operands, *rest = value.args
    shape = _static_shape(value.ty)
    if rest or shape is None or not isinstance(operands, relax.Tuple):
        return False
    if not isinstance(kernel, tvm.ir.GlobalVar) or not isinstance(mod[kernel], tirx.PrimFunc):
        return False
    fields = list(operands.fields)
    if not fields and math.prod(shape) > _MOST_CREATED:
        return False
    return all(isinstance(x, tvm.ir.GenericConst) or x in known for x in fields)


def _static_shape(kind: Any) -> list[int] | None:
    """Return the extents of a tensor that has elements and no symbolic extent."""
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        return None
    extents = list(kind.shape.values)
    if not all(isinstance(extent, tirx.IntImm) and int(extent) > 0 for extent in extents):
        return None
    return [int(extent) for extent in extents]


def _compiled(mod: tvm.IRModule, kernels: Sequence[tvm.ir.GlobalVar]) -> dict[Any, Any]:
    named = {var: f"folded{k}" for k, var in enumerate(kernels)}
    functions = {
        name: mod[var].with_attr("global_symbol", name).with_attr("target", _TARGET)
        for var, name in named.items()
    }
    library = tvm.compile(tvm.IRModule(functions), _TARGET)
    return {var: library[name] for var, name in named.items()}


def _folded(
    func: relax.Function, calls: dict[relax.Var, relax.Call], compiled: dict[Any, Any]
) -> relax.Function:
    values: dict[relax.Var, Any] = {}

    def bound(binding: Any) -> Any:
        value = binding.value
        if isinstance(value, tvm.ir.GenericConst):
            values[binding.var] = value.value
        call = calls.get(binding.var)
        if call is None:
            return binding
        shape, dtype = _static_shape(call.ty), str(call.ty.dtype.dtype)
        made = tvm.runtime.empty(shape, dtype)
        operands = (
            x.value if isinstance(x, tvm.ir.GenericConst) else values[x]
            for x in call.args[1].fields
        )
        compiled[call.args[0]](*operands, made)
        values[binding.var] = made
        return relax.VarBinding(binding.var, relax.const(made), binding.span)

    blocks = [block_like(block, [bound(x) for x in block.bindings]) for block in func.body.blocks]
    return with_blocks(func, blocks)
