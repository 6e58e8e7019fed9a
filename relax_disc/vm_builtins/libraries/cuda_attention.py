"""Attention for CUDA, of batches and of packed rows, with the arguments that `install` lists.

Which kernel of PyTorch computes it is chosen in `cuda_attention_kernels.py`.  What dropout keeps is
drawn by that kernel, from a seed that is made of the state of the random operators: other numbers
than the native library's, the same whenever the same step is computed.

Results, copies of grouped keys, padded batches and what kernels take by themselves lie beside the
arena; `relax_disc.ops.attention.device_memory` bounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from relax_disc.vm_builtins.libraries import random_seeds
from relax_disc.vm_builtins.libraries.cuda_attention_kernels import Problem
from relax_disc.vm_builtins.libraries.packed_rows import PackedRows

_Core = Callable[[Problem, int, Sequence[Any], Sequence[Any]], None]
"""Takes the layout, the operands before a mask, and what follows the numbers of all forms."""


def _attention(problem: Problem, layout: int, operands: Sequence[Any], rest: Sequence[Any]) -> None:
    out, lse = rest
    query, key, value, target = _views((*operands, out), layout)
    found, sums = problem.forward(query, key, value)
    target.copy_(found)
    torch.from_dlpack(lse).copy_(sums)


def _backward(problem: Problem, layout: int, operands: Sequence[Any], rest: Sequence[Any]) -> None:
    *given, lse = operands
    grad, query, key, value, out, *targets = _views((*given, *rest), layout)
    sums = torch.from_dlpack(lse)
    found = problem.backward(grad, query, key, value, out, sums)
    for target, gradient in zip(targets, found, strict=True):
        target.copy_(gradient)


def _packed(problem: Problem, layout: int, operands: Sequence[Any], rest: Sequence[Any]) -> None:
    rows, columns, out, lse = rest
    query, key, value, target = _views((*operands[:3], out), layout)
    sides = _sides(operands[3:], rows, columns)
    found, sums = problem.packed_forward(query, key, value, *sides)
    target.copy_(found)
    torch.from_dlpack(lse).copy_(sums)


def _packed_backward(
    problem: Problem, layout: int, operands: Sequence[Any], rest: Sequence[Any]
) -> None:
    rows, columns, *results = rest
    *given, lse = operands[:6]
    grad, query, key, value, out, *targets = _views((*given, *results), layout)
    sides, sums = _sides(operands[6:], rows, columns), torch.from_dlpack(lse)
    found = problem.packed_backward(grad, query, key, value, out, sums, *sides)
    for target, gradient in zip(targets, found, strict=True):
        target.copy_(gradient)


def _form(core: _Core, operands: int, is_masked: bool, drops: bool) -> Callable[..., None]:
    """Make the form of an attention function with a mask or dropout, or without."""

    def run(*arguments: Any) -> None:
        given, rest = arguments[:operands], list(arguments[operands:])
        mask = torch.from_dlpack(rest.pop(0)) if is_masked else None
        state = torch.from_dlpack(rest.pop(0)) if drops else None
        scale, is_causal, layout, *rest = rest
        p, seed = 0.0, 0
        if state is not None:
            p, stream, *rest = rest
            seed = random_seeds.seed_of(state, stream)
        is_sighted = bool(layout >> 16 & 1)
        core(Problem(scale, bool(is_causal), mask, p, seed, is_sighted), layout, given, rest)

    return run


FUNCTIONS: dict[str, Callable[..., None]] = {
    name + "_masked" * is_masked + "_dropout" * drops: _form(core, operands, is_masked, drops)
    for name, core, operands, ways in (
        ("attention", _attention, 3, (False, True)),
        ("attention_backward", _backward, 6, (False, True)),
        ("packed_attention", _packed, 7, (False,)),
        ("packed_attention_backward", _packed_backward, 10, (False,)),
    )
    for is_masked in (False, True)
    for drops in ways
}
"""What `relax_disc.cuda.*` has of this module; packed rows have no form with dropout."""


def _sides(where: Sequence[Any], rows: int, columns: int) -> tuple[PackedRows, PackedRows]:
    """Read starts and places of queries and of keys, and their lengths in the padded batch."""
    starts, places, key_starts, key_places = (torch.from_dlpack(x) for x in where)
    return PackedRows(starts, places, rows), PackedRows(key_starts, key_places, columns)


def _views(values: Sequence[Any], layout: int) -> list[torch.Tensor]:
    """View every tensor as ``[batch, length, heads, dim]``; see `install` for ``layout``."""
    tensors = [torch.from_dlpack(value) for value in values]
    for i, x in enumerate(tensors):
        if layout >> 8 + i & 1:
            tensors[i] = x.transpose(0, 1)
        elif not layout >> i & 1:
            tensors[i] = x.transpose(1, 2)
    return tensors
