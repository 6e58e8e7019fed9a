"""Mixtures of experts, as Hugging Face writes them: products of groups of rows."""

from __future__ import annotations

from typing import Any

from tvm import relax

from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter
from relax_disc.ops.grouped_matmul import grouped_matmul, grouped_outer
from relax_disc.ops.operand_views import permuted_view

_TRANSPOSED = (0, 2, 1)


@converts("transformers.grouped_mm_fallback.default")
def grouped_mm(emitter: Emitter, rows: Any, weights: Any, ends: Any) -> Any:
    """Product of each row with its expert's matrix."""
    return emitter.emit(grouped_matmul(rows, weights, ends))


@converts("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_backward(
    emitter: Emitter, rows: Any, weights: Any, ends: Any, grad: Any
) -> tuple[Any, Any]:
    """Gradients of `grouped_mm` by the rows, and by the matrices in the layout of these."""
    of_rows = emitter.emit(grouped_matmul(grad, weights, ends, transposed=True))
    if permuted_view(weights, emitter.definition).axes == _TRANSPOSED:
        stored = emitter.emit(grouped_outer(grad, rows, ends))
        return of_rows, emitter.emit(relax.op.permute_dims(stored, list(_TRANSPOSED)))
    return of_rows, emitter.emit(grouped_outer(rows, grad, ends))
