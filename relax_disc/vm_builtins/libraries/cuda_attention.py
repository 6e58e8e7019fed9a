"""Attention for CUDA, of batches and of packed rows, with the arguments that `install` lists.

Which kernel of PyTorch computes it is chosen in `cuda_attention_kernels.py`.

Limits: results, copies of grouped keys, padded batches and what kernels take by themselves lie
beside the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from relax_disc.vm_builtins.libraries.cuda_attention_kernels import Problem
from relax_disc.vm_builtins.libraries.packed_rows import PackedRows


def attention_masked(
    q: Any, k: Any, v: Any, mask: Any, scale: float, is_causal: int, layout: int, out: Any, lse: Any
) -> None:
    """Compute attention with a mask and the log of its sums."""
    query, key, value, target = _views((q, k, v, out), layout)
    found, sums = _problem(scale, is_causal, mask).forward(query, key, value)
    target.copy_(found)
    torch.from_dlpack(lse).copy_(sums)


def attention_backward_masked(
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    mask: Any,
    scale: float,
    is_causal: int,
    layout: int,
    *gradients: Any,
) -> None:
    """Compute the gradients of q, k and v of attention with a mask."""
    grad, query, key, value, result, *targets = _views((grad_out, q, k, v, out, *gradients), layout)
    problem, sums = _problem(scale, is_causal, mask), torch.from_dlpack(lse)
    found = problem.backward(grad, query, key, value, result, sums)
    for target, gradient in zip(targets, found, strict=True):
        target.copy_(gradient)


def packed_attention_masked(
    q: Any,
    k: Any,
    v: Any,
    starts: Any,
    places: Any,
    key_starts: Any,
    key_places: Any,
    mask: Any,
    scale: float,
    is_causal: int,
    layout: int,
    rows: int,
    columns: int,
    out: Any,
    lse: Any,
) -> None:
    """Compute attention over packed sequences (`relax_disc.ops.attention.packed`).

    ``rows`` and ``columns`` are the lengths of queries and keys in the padded batch.
    """
    query, key, value, target = _views((q, k, v, out), layout)
    sides = _packed(starts, places, rows), _packed(key_starts, key_places, columns)
    found, sums = _problem(scale, is_causal, mask).packed_forward(query, key, value, *sides)
    target.copy_(found)
    torch.from_dlpack(lse).copy_(sums)


def packed_attention_backward_masked(
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    starts: Any,
    places: Any,
    key_starts: Any,
    key_places: Any,
    mask: Any,
    scale: float,
    is_causal: int,
    layout: int,
    rows: int,
    columns: int,
    *gradients: Any,
) -> None:
    """Compute the gradients of attention over packed sequences with a mask."""
    grad, query, key, value, result, *targets = _views((grad_out, q, k, v, out, *gradients), layout)
    sides = _packed(starts, places, rows), _packed(key_starts, key_places, columns)
    problem, sums = _problem(scale, is_causal, mask), torch.from_dlpack(lse)
    found = problem.packed_backward(grad, query, key, value, result, sums, *sides)
    for target, gradient in zip(targets, found, strict=True):
        target.copy_(gradient)


def _without_mask(function: Callable[..., None], position: int) -> Callable[..., None]:
    """Make the form of an attention function that gets no mask: None takes its position."""

    def run(*arguments: Any) -> None:
        function(*arguments[:position], None, *arguments[position:])

    return run


FUNCTIONS: dict[str, Callable[..., None]] = {
    "attention": _without_mask(attention_masked, 3),
    "attention_masked": attention_masked,
    "attention_backward": _without_mask(attention_backward_masked, 6),
    "attention_backward_masked": attention_backward_masked,
    "packed_attention": _without_mask(packed_attention_masked, 7),
    "packed_attention_masked": packed_attention_masked,
    "packed_attention_backward": _without_mask(packed_attention_backward_masked, 10),
    "packed_attention_backward_masked": packed_attention_backward_masked,
}
"""What `relax_disc.cuda.*` has of this module."""


def _problem(scale: float, is_causal: int, mask: Any) -> Problem:
    return Problem(scale, bool(is_causal), None if mask is None else torch.from_dlpack(mask))


def _packed(starts: Any, places: Any, length: int) -> PackedRows:
    return PackedRows(torch.from_dlpack(starts), torch.from_dlpack(places), int(length))


def _views(values: tuple[Any, ...], layout: int) -> list[torch.Tensor]:
    """View every tensor as ``[batch, length, heads, dim]``; see `install` for ``layout``."""
    tensors = [torch.from_dlpack(value) for value in values]
    for i, x in enumerate(tensors):
        if layout >> 8 + i & 1:
            tensors[i] = x.transpose(0, 1)
        elif not layout >> i & 1:
            tensors[i] = x.transpose(1, 2)
    return tensors
