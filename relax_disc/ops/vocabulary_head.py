"""A linear head with cross-entropy in chunks of rows, which `ChunkVocabularyHead` emits.

Variants and workspace of `relax_disc.cpu.vocabulary_head{_bias}{_z}{_frozen|_lse}`.

Arguments: x of N rows, weight [V, D], target [N] int64, grad_loss [], bias [V] (`_bias`),
lse_factor [N] float32 (`_z`), ignore_index, label_smoothing, is_mean; results: loss [], grad_x of
N rows, grad_bias [V] (`_bias`), lse [N] float32 (`_z`), grad_weight [V, D] (unless `_frozen`; if
`_lse`, in its place row_lse [N] float64), workspace [rows of a chunk, `workspace_columns(V, D)`],
the rows being a multiple of `ROW_UNIT`.

`relax_disc.cpu.vocabulary_head_weight{_bias}{_z}` makes some rows of grad_weight later, the same to
the last bit. Arguments: x, those rows of the weight [R, D], target, grad_loss, bias, lse_factor,
row_lse, ignore_index, label_smoothing, is_mean, the first row (a multiple of `BLOCK_CLASSES`), V;
results: rows of grad_weight [R, D], workspace [rows of a chunk, `workspace_columns(R, D)`].

The loss is the cross-entropy of the rows whose label is not ignored. Gradients are those of
``grad_loss * loss + sum(lse_factor * lse**2) / 2``, `lse` being the log-sum-exp of each row's
logits (z-loss). Rows that neither count nor have a factor are not computed: their `lse` is 0.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from relax_disc.ops import registry

# As in `src/kernels/vocabulary_head/head_operands.h`.
ROW_UNIT, BLOCK_CLASSES, STATISTICS = 16, 336, 3

FORMS = tuple(map("".join, product(["", "_bias"], ["", "_z"])))


def workspace_columns(classes: Any, width: Any) -> Any:
    """Columns of the workspace, for numbers as well as symbolic extents.

    Logits, the inputs packed twice, and statistics of each block of classes.
    """
    blocks = (classes + (BLOCK_CLASSES - 1)) // BLOCK_CLASSES
    return classes + 2 * ((width + (ROW_UNIT - 1)) // ROW_UNIT * ROW_UNIT) + STATISTICS * blocks


def _facts(products: int) -> registry.LibraryFunction:
    """Count so many products of rows x classes x width; what has the logits is a result."""

    def flops(views: list[Any], numbers: list[int]) -> Any:
        del numbers
        return 2 * products * registry.elements(views[0].shape) * views[1].shape[0]

    def workspace(views: list[Any], numbers: list[int]) -> registry.Workspace:
        del numbers
        return "vocabulary_head", (
            registry.elements(views[2].shape),
            views[-1].shape[0],
            *views[1].shape,
        )

    return registry.LibraryFunction(flops=flops, workspace=workspace)


for _form in FORMS:
    registry.LIBRARY[f"vocabulary_head{_form}"] = _facts(3)
    registry.LIBRARY[f"vocabulary_head_weight{_form}"] = _facts(2)
    for _end in ("_frozen", "_lse"):
        registry.LIBRARY[f"vocabulary_head{_form}{_end}"] = _facts(2)
