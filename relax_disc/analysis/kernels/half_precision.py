"""Evaluate half-precision stages in float32, rounding where a value is stored or cast explicitly.

More exact than rounding after each operation, and what processors without half-precision
arithmetic do anyway; PyTorch's own compiler does the same inside a fused kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.mutate import mutate, walk
from relax_disc.analysis.kernels.stages import Stage

_HALF = ("float16", "bfloat16")
_WIDE = "float32"

_BINARY = (prim.Add, prim.Sub, prim.Mul, prim.Div, prim.Max, prim.Min, prim.Mod)
# What can be of another type than its parts.
_SOURCES = (tvm.ir.TensorLoad, tvm.ir.Var, tvm.ir.Call, prim.FloatImm, prim.Cast)
_COMPARISONS = (prim.LT, prim.LE, prim.GT, prim.GE, prim.EQ, prim.NE)


def is_half(dtype: object) -> bool:
    """Whether an element type is narrower than the arithmetic."""
    return str(dtype) in _HALF


def widen_stage(stage: Stage) -> Stage:
    """Let a stage compute in float32 what it computes in half precision.

    The value is then float32 where the buffer is not; whoever stores it rounds it.
    """
    expressions = [*stage.expressions, *([] if stage.init is None else [stage.init])]
    if not any(_has_half(expr) for expr in expressions):
        return stage
    lets = []
    mapping: dict[Any, Any] = {}
    for var, expr in stage.lets:
        value = _widen(expr, mapping)
        if is_half(var.ty.dtype):
            mapping[var] = tirx.Var(str(var.name), _WIDE)
        lets.append((mapping.get(var, var), value))
    return replace(
        stage,
        lets=tuple(lets),
        value=_widen(stage.value, mapping),
        init=None if stage.init is None else _widen(stage.init, mapping),
    )


def widen_bfloat16(value: Any) -> Any:
    """Convert by bits; TVM 0.27 converts the bits as an integer when it reads through a view."""
    return from_bfloat16_bits(tirx.reinterpret("uint16", value))


def from_bfloat16_bits(bits: Any) -> Any:
    """Convert the bits of a bfloat16 value, uint16, to float32."""
    return tirx.reinterpret(_WIDE, tirx.Cast("uint32", bits) << tirx.const(16, "uint32"))


def to_bfloat16_bits(value: Any) -> Any:
    """Round a float32 value to the bits of a bfloat16 one, uint16."""
    return tirx.Cast("uint16", _carried(value) >> tirx.const(16, "uint32"))


def _rounded(value: Any, dtype: str) -> Any:
    """Round a float32 value to what ``dtype`` can hold."""
    if dtype == "float16":
        return tirx.Cast(_WIDE, tirx.Cast(dtype, value))
    return tirx.reinterpret(_WIDE, _carried(value) & tirx.const(0xFFFF0000, "uint32"))


def _carried(value: Any) -> Any:
    """Bits of a float32 value, of which the upper half is the nearest bfloat16 value."""
    bits = tirx.reinterpret("uint32", value)
    # To the nearest, ties to the even one: half of the last kept bit, less one if that bit is 0.
    carry = ((bits >> tirx.const(16, "uint32")) & tirx.const(1, "uint32")) + tirx.const(
        0x7FFF, "uint32"
    )
    return bits + carry


def _has_half(expr: Any) -> bool:
    def stop(node: Any) -> Any:
        kind = getattr(node, "ty", None)
        return tvm_ffi.VisitInterrupt() if is_half(getattr(kind, "dtype", None)) else None

    return walk(expr, _SOURCES, stop) is not None


def _widen(expr: Any, mapping: dict[Any, Any]) -> Any:
    def both(node: Any, mutator: Any) -> Any:
        return type(node)(mutator.mutate(node.a), mutator.mutate(node.b))

    def on_constant(node: Any, mutator: Any) -> Any:
        return tirx.const(float(node.value), _WIDE) if is_half(node.ty.dtype) else node

    def on_load(load: Any, mutator: Any) -> Any:
        load = mutator.default_mutate(load)
        return tirx.Cast(_WIDE, load) if is_half(load.ty.dtype) else load

    def on_cast(cast: Any, mutator: Any) -> Any:
        value = mutator.mutate(cast.value)
        dtype = str(cast.ty.dtype)
        if is_half(dtype):
            # Integers up to 256 (bfloat16) or 2048 are exact; larger ones are rounded as well.
            return _rounded(
                value if str(value.ty.dtype) == _WIDE else tirx.Cast(_WIDE, value), dtype
            )
        return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)

    def on_select(select: Any, mutator: Any) -> Any:
        parts = (select.condition, select.true_value, select.false_value)
        return prim.Select(*(mutator.mutate(part) for part in parts))

    def on_call(call: Any, mutator: Any) -> Any:
        if not is_half(getattr(call.ty, "dtype", None)):
            return mutator.default_mutate(call)
        arguments = [mutator.mutate(argument) for argument in call.args]
        return tvm.ir.Call(call.op, arguments, call.attrs, ret_ty=_WIDE)

    return mutate(
        expr,
        [
            (_BINARY, both),
            (_COMPARISONS, both),
            (prim.FloatImm, on_constant),
            (tvm.ir.TensorLoad, on_load),
            (prim.Cast, on_cast),
            (prim.Select, on_select),
            (tvm.ir.Call, on_call),
            (tvm.ir.Var, lambda var, mutator: mapping.get(var, var)),
        ],
    )
