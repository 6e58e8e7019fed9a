"""The coefficient that clips gradients by their global norm, computed inside the graph.

As ``torch.nn.utils.clip_grad_norm_`` with the 2-norm: ``min(1, max_norm / (total + 1e-6))``.
Squares are summed along the last axis in the gradients' type, the rows' sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax

from relax_disc.frontend.capture.source_lines import SourceLine
from relax_disc.frontend.emitter import Emitter
from relax_disc.frontend.optimizer.kernels import hyper_dtype

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
