"""Gradients before the update: added to those of earlier batches, and clipped by their norm.

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

from tvm import relax

from relax_disc.frontend.capture.source_lines import SourceLine
from relax_disc.frontend.capture.trace import Traced
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


def emit_clip(
    emitter: Emitter, grads: Sequence[relax.Expr], max_norm: float
) -> tuple[relax.Expr | None, relax.Expr]:
    """Emit the clip coefficient and the total norm.

    Each gradient is squared and summed when it is there, so that without a coefficient none has to
    wait for the others.

    Both are scalars, float32 (float64 when every gradient is). An infinite ``max_norm`` clips
    nothing: the coefficient is None.
    """
    emitter.locate("squares", SourceLine("", 0))
    parts = []
    for grad in grads:
        wide = emitter.cast(grad, hyper_dtype(emitter.dtype(grad)))
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
