"""Numpy twins of `relax_disc.cpu.vocabulary_head{_bias}{_z}{_frozen}`; see `vocabulary_head.cc`.

Arguments: x of N rows, weight [V, D], target [N] int64, grad_loss [], bias [V] (`_bias`),
lse_factor [N] float32 (`_z`), ignore_index, label_smoothing, is_mean; results: loss [], grad_x of
N rows, grad_bias [V] (`_bias`), lse [N] float32 (`_z`), grad_weight [V, D] (unless `_frozen`),
workspace [rows of a chunk, `workspace_columns(V, D)`], the rows being a multiple of `ROW_UNIT`; the
twins use the row count alone.

The loss is the cross-entropy of the rows whose label is not ignored. Gradients are those of
``grad_loss * loss + sum(lse_factor * lse**2) / 2``, `lse` being the log-sum-exp of each row's
logits (z-loss). Rows that neither count nor have a factor are not computed: their `lse` is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from relax_disc.vm_builtins.libraries.arrays import array_of

# As in `src/kernels/vocabulary_head_chunk.h`.
ROW_UNIT, BLOCK_CLASSES, STATISTICS = 16, 336, 3


def workspace_columns(classes: Any, width: Any) -> Any:
    """Columns of the workspace, for numbers as well as symbolic extents.

    Logits, the inputs packed twice, and statistics of each block of classes.
    """
    blocks = (classes + (BLOCK_CLASSES - 1)) // BLOCK_CLASSES
    return classes + 2 * ((width + (ROW_UNIT - 1)) // ROW_UNIT * ROW_UNIT) + STATISTICS * blocks


def _twin(*, has_bias: bool, has_lse: bool, is_frozen: bool) -> Callable[..., None]:
    def head(x: Any, weight: Any, target: Any, grad_loss: Any, *others: Any) -> None:
        rest = list(others)
        bias = array_of(rest.pop(0)) if has_bias else None
        lse_factor = array_of(rest.pop(0)).reshape(-1) if has_lse else None
        ignore_index, label_smoothing, is_mean, loss, grad_x = rest[:5]
        *gradients, workspace = rest[5:]
        grad_bias = array_of(gradients.pop(0)) if has_bias else None
        lse = array_of(gradients.pop(0)).reshape(-1) if has_lse else None
        grad_weight = None if is_frozen else array_of(gradients.pop(0))
        options = (ignore_index, label_smoothing, is_mean, int(workspace.shape[0]))
        operands = (x, weight, target, grad_loss, bias, lse_factor)
        _head(operands, options, (loss, grad_x, grad_bias, lse, grad_weight))

    return head


def _head(
    operands: tuple[Any, ...], options: tuple[int, float, int, int], results: tuple[Any, ...]
) -> None:
    x, weight, target, grad_loss, bias, lse_factor = operands
    ignore_index, smoothing, is_mean, chunk = options
    loss, grad_x, grad_bias, lse_result, grad_weight = results
    table, labels = array_of(weight), array_of(target).reshape(-1)
    classes, width = table.shape
    inputs = array_of(x).reshape(-1, width)
    counts = labels != ignore_index
    outside = np.flatnonzero(counts & ((labels < 0) | (labels >= classes)))
    if outside.size:
        raise ValueError(
            f"label {labels[outside[0]]} of row {outside[0]} is outside 0 .. {classes - 1}"
        )
    rows = np.flatnonzero(counts if lse_factor is None else counts | (lse_factor != 0))
    counted = np.float64(counts.sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = float(array_of(grad_loss)) / counted if is_mean else float(array_of(grad_loss))
    gradient = np.zeros_like(inputs)
    for result_of_all in (grad_bias, lse_result, grad_weight):
        if result_of_all is not None:
            result_of_all[...] = 0
    total = 0.0
    for first in range(0, rows.size, chunk):
        part = rows[first : first + chunk]
        picked, kept = inputs[part], counts[part]
        hot = (np.flatnonzero(kept), labels[part][kept])
        logits = picked @ table.T if bias is None else picked @ table.T + bias
        peak = logits.max(1, keepdims=True)
        lse = peak + np.log(np.exp(logits - peak).sum(1, keepdims=True, dtype=np.float64))
        losses = lse[kept, 0] - (1 - smoothing) * logits[hot]
        losses -= smoothing / classes * logits[kept].sum(1, dtype=np.float64)
        total += float(losses.sum())
        share = np.exp(logits - lse.astype(logits.dtype))
        change = share - smoothing / classes
        change[hot] -= 1 - smoothing
        change = change * np.where(kept, scale, 0.0)[:, None]
        if lse_factor is not None:
            lse_result[part] = lse[:, 0]
            change += share * (lse_factor[part, None] * lse)
        change = change.astype(logits.dtype)
        gradient[part] = change @ table
        if grad_bias is not None:
            grad_bias += change.sum(0)
        if grad_weight is not None:
            grad_weight += change.T @ picked
    array_of(grad_x).reshape(-1, width)[...] = gradient
    with np.errstate(invalid="ignore"):
        array_of(loss)[...] = np.float64(total) / counted if is_mean else total


TWINS = {
    "vocabulary_head" + "_bias" * has_bias + "_z" * has_lse + "_frozen" * is_frozen: _twin(
        has_bias=has_bias, has_lse=has_lse, is_frozen=is_frozen
    )
    for has_bias in (False, True)
    for has_lse in (False, True)
    for is_frozen in (False, True)
}
