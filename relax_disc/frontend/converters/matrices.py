"""Matrix products and the operators of this package that are traced whole."""

from __future__ import annotations

from typing import Any

from tvm import relax

from relax_disc import ops
from relax_disc.frontend.converters.registry import WIDE, converts
from relax_disc.frontend.emitter import Emitter


@converts("aten.mm.default", "aten.bmm.default")
def matmul(emitter: Emitter, x: Any, y: Any) -> Any:
    """Matrix product; short floats are summed in float32, as PyTorch does."""
    if emitter.dtype(x) != emitter.dtype(y):
        raise emitter.refuse(f"it mixes {emitter.dtype(x)} and {emitter.dtype(y)}")
    return product(emitter, x, y)


def product(emitter: Emitter, x: Any, y: Any) -> Any:
    """Emit a matrix product of two tensors of one type, summed in float32 for short floats."""
    dtype = emitter.dtype(x)
    whole = emitter.emit(relax.op.matmul(x, y, out_dtype=WIDE.get(dtype, dtype)))
    return emitter.cast(whole, dtype)


@converts("relax_disc.attention.default")
def attention(
    emitter: Emitter, q: Any, k: Any, v: Any, mask: Any, scale: float, is_causal: bool
) -> Any:
    """Attention, whole."""
    return emitter.fields(ops.attention(q, k, v, mask, scale=scale, is_causal=is_causal))


@converts("relax_disc.attention_backward.default")
def attention_backward(
    emitter: Emitter,
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    mask: Any,
    scale: float,
    is_causal: bool,
) -> Any:
    """Gradients of attention, whole."""
    call = ops.attention_backward(grad, q, k, v, out, lse, mask, scale=scale, is_causal=is_causal)
    return emitter.fields(call)


@converts("relax_disc.cross_entropy.default")
def cross_entropy(
    emitter: Emitter,
    logits: Any,
    target: Any,
    weight: Any,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Any:
    """Cross-entropy, whole."""
    call = ops.cross_entropy(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return emitter.fields(call)


@converts("relax_disc.logsumexp.default")
def logsumexp(emitter: Emitter, x: Any) -> Any:
    """Log of the sum of exponentials of the rows, whole."""
    return emitter.emit(ops.logsumexp(x))


@converts("relax_disc.logsumexp_backward.default")
def logsumexp_backward(emitter: Emitter, grad: Any, x: Any, lse: Any) -> Any:
    """Gradient of the log of the sum of exponentials, whole."""
    return emitter.emit(ops.logsumexp_backward(grad, x, lse))


@converts("relax_disc.cross_entropy_backward.default")
def cross_entropy_backward(
    emitter: Emitter,
    grad: Any,
    logits: Any,
    target: Any,
    lse: Any,
    count: Any,
    weight: Any,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> Any:
    """Gradient of the cross-entropy, whole."""
    return emitter.emit(
        ops.cross_entropy_backward(
            grad,
            logits,
            target,
            lse,
            count,
            weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    )
