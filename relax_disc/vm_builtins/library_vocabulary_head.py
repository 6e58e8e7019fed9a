"""Numpy twins of `relax_disc.cpu.vocabulary_head`; see `src/vocabulary_head.cc`.

Arguments: x of N rows, weight [V, D], target [N] int64, grad_loss [], bias [V] (only where the name
says so), ignore_index, label_smoothing, is_mean; results: loss [], grad_x of N rows, grad_bias [V]
(with a bias), grad_weight [V, D] (unless `frozen`), workspace [rows of a chunk,
`workspace_columns(V, D)`], the rows being a multiple of `ROW_UNIT`; the twins use the row count
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from relax_disc.vm_builtins.library_arrays import array_of

# As in `src/vocabulary_head_chunk.h`.
ROW_UNIT, BLOCK_CLASSES, STATISTICS = 16, 336, 3


def workspace_columns(classes: Any, width: Any) -> Any:
    """Columns of the workspace, for numbers as well as symbolic extents.

    Logits, the inputs packed twice, and statistics of each block of classes.
    """
    blocks = (classes + (BLOCK_CLASSES - 1)) // BLOCK_CLASSES
    return classes + 2 * ((width + (ROW_UNIT - 1)) // ROW_UNIT * ROW_UNIT) + STATISTICS * blocks


def _twin(*, has_bias: bool, is_frozen: bool) -> Callable[..., None]:
    def head(x: Any, weight: Any, target: Any, grad_loss: Any, *others: Any) -> None:
        rest = list(others)
        bias = array_of(rest.pop(0)) if has_bias else None
        ignore_index, label_smoothing, is_mean, loss, grad_x = rest[:5]
        *gradients, workspace = rest[5:]
        grad_bias = array_of(gradients[0]) if has_bias else None
        grad_weight = None if is_frozen else array_of(gradients[-1])
        options = (ignore_index, label_smoothing, is_mean, int(workspace.shape[0]))
        _head(x, weight, target, grad_loss, bias, options, loss, grad_x, grad_bias, grad_weight)

    return head


def _head(
    x: Any,
    weight: Any,
    target: Any,
    grad_loss: Any,
    bias: np.ndarray | None,
    options: tuple[int, float, int, int],
    loss: Any,
    grad_x: Any,
    grad_bias: np.ndarray | None,
    grad_weight: np.ndarray | None,
) -> None:
    ignore_index, smoothing, is_mean, chunk = options
    table, labels = array_of(weight), array_of(target).reshape(-1)
    classes, width = table.shape
    inputs = array_of(x).reshape(-1, width)
    rows = np.flatnonzero(labels != ignore_index)
    outside = rows[(labels[rows] < 0) | (labels[rows] >= classes)]
    if outside.size:
        raise ValueError(
            f"label {labels[outside[0]]} of row {outside[0]} is outside 0 .. {classes - 1}"
        )
    counted = np.float64(rows.size)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = float(array_of(grad_loss)) / counted if is_mean else float(array_of(grad_loss))
    gradient = np.zeros_like(inputs)
    for gradient_of_all in (grad_bias, grad_weight):
        if gradient_of_all is not None:
            gradient_of_all[...] = 0
    total = 0.0
    for first in range(0, rows.size, chunk):
        part = rows[first : first + chunk]
        picked, hot = inputs[part], (np.arange(part.size), labels[part])
        logits = picked @ table.T if bias is None else picked @ table.T + bias
        peak = logits.max(1, keepdims=True)
        lse = peak + np.log(np.exp(logits - peak).sum(1, keepdims=True, dtype=np.float64))
        losses = lse[:, 0] - (1 - smoothing) * logits[hot]
        losses -= smoothing / classes * logits.sum(1, dtype=np.float64)
        total += float(losses.sum())
        change = np.exp(logits - lse.astype(logits.dtype)) - smoothing / classes
        change[hot] -= 1 - smoothing
        change = (change * scale).astype(logits.dtype)
        gradient[part] = change @ table
        if grad_bias is not None:
            grad_bias += change.sum(0)
        if grad_weight is not None:
            grad_weight += change.T @ picked
    array_of(grad_x).reshape(-1, width)[...] = gradient
    with np.errstate(invalid="ignore"):
        array_of(loss)[...] = np.float64(total) / counted if is_mean else total


vocabulary_head = _twin(has_bias=False, is_frozen=False)
vocabulary_head_frozen = _twin(has_bias=False, is_frozen=True)
vocabulary_head_bias = _twin(has_bias=True, is_frozen=False)
vocabulary_head_bias_frozen = _twin(has_bias=True, is_frozen=True)
