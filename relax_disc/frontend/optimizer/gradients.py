"""Gradients before the update: added to those of earlier batches, unscaled, clipped by their norm.

Each gradient becomes an input of kind ``"gradient"``, the caller's own tensor (``p.grad``), and an
output paired with it: the sum, written in place.  What the adding kernels read beside them passes a
guard first, so nothing is added before the loss has been checked.

Clipping is as ``torch.nn.utils.clip_grad_norm_`` with the 2-norm: ``min(1, max_norm / (total +
1e-6))``.  Squares are summed along the last axis in the gradients' type, the rows' sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tvm import relax, te, tirx

from relax_disc.frontend.capture.source_lines import SourceLine
from relax_disc.frontend.capture.traced.trace import Traced
from relax_disc.frontend.emitter import Emitter, dtype_name
from relax_disc.frontend.importer import Parameters, variable_name
from relax_disc.frontend.index_checks import Guards
from relax_disc.frontend.optimizer.kernels import SUM_HYPER, hyper_dtype, sum_kernel
from relax_disc.frontend.spec import InputSpec, OutputSpec


def declare_gradients(traced: Traced, parameters: Parameters) -> tuple[int, ...]:
    """Declare the sums so far, and what guards them, as parameters of the function.

    Returned: positions of the sums.
    """
    first = len(parameters.specs)
    kinds = set()
    for index in traced.gradients:
        target, tensor = str(traced.arguments[index].target), traced.arguments[index].tensor
        assert tensor is not None
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        name = f"{variable_name(target)}_grad"
        parameters.add(InputSpec(name, "gradient", target, "", -1, shape, dtype), shape)
        kinds.add(hyper_dtype(dtype))
    positions = tuple(range(first, len(parameters.specs)))
    for dtype in sorted(kinds):
        shape = (len(SUM_HYPER),)
        parameters.add(InputSpec(f"adding_{dtype}", "adding", dtype, "", -1, shape, dtype), shape)
    return positions


def emit_sums(
    emitter: Emitter,
    parameters: Parameters,
    positions: Sequence[int],
    grads: Sequence[Any],
    guards: Guards,
) -> tuple[list[OutputSpec], list[Any]]:
    """Add the new gradients to the sums so far.

    ``outputs``, ``values``: the sums, paired with the inputs that they are written over.
    """
    guarded: dict[str, Any] = {}
    for spec, variable in zip(parameters.specs, parameters.variables, strict=True):
        if spec.kind == "adding":
            guarded[spec.dtype] = guards.behind(variable)
    outputs, values = [], []
    for position, grad in zip(positions, grads, strict=True):
        spec = parameters.specs[position]
        extents: Any = list(spec.shape)
        kernel = sum_kernel(tuple(extents), spec.dtype)
        emitter.locate(f"{spec.name}_sum", SourceLine("", 0))
        args = [parameters.variables[position], grad, guarded[hyper_dtype(spec.dtype)]]
        kind = relax.TensorType(extents, spec.dtype)
        values.append(emitter.kernel(kernel, "update_sum", args, kind))
        outputs.append(OutputSpec(str(spec.target), "gradient", position))
    return outputs, values


op: Any = relax.op

_EPS = 1e-6
"""Of ``torch.nn.utils.clip_grad_norm_``."""


def emit_inverse(emitter: Emitter, scale: relax.Var) -> relax.Expr:
    """Emit what scaled gradients are multiplied with, float32: as `torch.amp.GradScaler` has it."""
    emitter.locate("inverse_scale", SourceLine("", 0))
    wide = emitter.cast(scale, "float64")
    return emitter.cast(emitter.emit(op.divide(relax.const(1.0, "float64"), wide)), "float32")


def emit_overflow(emitter: Emitter, grads: Sequence[relax.Expr]) -> relax.Expr:
    """Emit 1 if some element of the gradients is infinite or NaN, else 0; float32."""
    emitter.locate("overflow", SourceLine("", 0))
    parts = []
    for grad in grads:
        count = emitter.te("not_finite", _rows_not_finite, grad)
        if emitter.shape(count):
            count = emitter.emit(op.sum(count))
        parts.append(count)
    stacked = emitter.emit(op.stack(parts, axis=0))
    return emitter.emit(op.minimum(emitter.emit(op.sum(stacked)), relax.const(1.0, "float32")))


def _rows_not_finite(x: Any) -> Any:
    """Count the elements along the last axis that are infinite or NaN."""
    largest = tirx.const(torch.finfo(getattr(torch, str(x.dtype))).max, "float64")
    one, zero = tirx.const(1, "float32"), tirx.const(0, "float32")

    def counts(*i: Any) -> Any:
        value = x(*i)
        if str(x.dtype) != "float64":
            value, limit = value.astype("float32"), largest.astype("float32")
        else:
            limit = largest
        return tirx.Select(tirx.abs(value) <= limit, zero, one)  # NaN is not

    if not x.shape:
        return te.compute((), lambda: counts(), name="not_finite")
    axis = te.reduce_axis((0, x.shape[-1]), "k")
    return te.compute(
        x.shape[:-1], lambda *i: te.sum(counts(*i, axis), axis=axis), name="not_finite"
    )


def emit_coefficient(
    emitter: Emitter, clip: relax.Expr | None, inverse: relax.Expr, overflow: relax.Expr
) -> relax.Expr:
    """Emit what an update multiplies its gradient with: NaN tells it to leave all as it was."""
    emitter.locate("coefficient", SourceLine("", 0))
    if clip is not None:
        inverse = emitter.emit(op.multiply(emitter.cast(inverse, emitter.dtype(clip)), clip))
    dtype = emitter.dtype(inverse)
    is_finite = emitter.emit(op.equal(overflow, relax.const(0.0, "float32")))
    return emitter.emit(op.where(is_finite, inverse, relax.const(math.nan, dtype)))


def emit_clip(
    emitter: Emitter,
    grads: Sequence[relax.Expr],
    max_norm: float,
    inverse: relax.Expr | None = None,
) -> tuple[relax.Expr | None, relax.Expr]:
    """Emit the clip coefficient and the total norm; of gradients times ``inverse`` if there is one.

    Each gradient is squared and summed when it is there, so that without a coefficient none has to
    wait for the others.

    Both are scalars, float32 (float64 when every gradient is). An infinite ``max_norm`` clips
    nothing: the coefficient is None.
    """
    emitter.locate("squares", SourceLine("", 0))
    parts = []
    for grad in grads:
        wide = emitter.cast(grad, hyper_dtype(emitter.dtype(grad)))
        if inverse is not None:
            factor = emitter.cast(inverse, emitter.dtype(wide))
            wide = emitter.emit(op.multiply(wide, factor))
        squares = emitter.emit(op.multiply(wide, wide))
        if emitter.shape(squares):
            rows = emitter.emit(op.sum(squares, [-1]))
            squares = emitter.emit(op.sum(emitter.cast(rows, "float64")))
        parts.append(emitter.cast(squares, "float64"))
    emitter.locate("norm", SourceLine("", 0))
    stacked = emitter.emit(op.stack(parts, axis=0))
    total = emitter.emit(op.sqrt(emitter.emit(op.sum(stacked))))
    all_double = all(emitter.dtype(grad) == "float64" for grad in grads)
    dtype = "float64" if all_double else "float32"
    if math.isinf(max_norm):
        return None, emitter.cast(total, dtype)
    padded = emitter.emit(op.add(total, relax.const(_EPS, "float64")))
    ratio = emitter.emit(op.divide(relax.const(float(max_norm), "float64"), padded))
    coefficient = emitter.emit(op.minimum(ratio, relax.const(1.0, "float64")))
    return emitter.cast(coefficient, dtype), emitter.cast(total, dtype)
