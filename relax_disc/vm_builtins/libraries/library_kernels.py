"""Library functions that compiled code calls, and their numpy twins.

`install()` makes every function of the list below exist: those of the native library where it can
be built, else the twins here. The twins are also the oracle of the tests.

============================================ ====================================================
`relax_disc.cpu.matmul`                      a, b, a_split, b_split, transpose_a, transpose_b, c
`relax_disc.cpu.matmul_add`                  a, b, addend, (as above), c
`relax_disc.cpu.batch_matmul`                a, b, a_axes, b_axes, c_axes, c
`relax_disc.cpu.attention`                   see `library_attention`
`relax_disc.cpu.attention_masked`            see `library_attention`
`relax_disc.cpu.attention_backward`          see `library_attention`
`relax_disc.cpu.attention_backward_masked`   see `library_attention`
`relax_disc.cpu.ctc_loss`                    see `library_ctc`
`relax_disc.cpu.ctc_loss_backward`           see `library_ctc`
`relax_disc.cpu.embedding_backward`          grad, ids, padding_idx, out
`relax_disc.cpu.embedding_backward_add`      grad, ids, addend, padding_idx, out
`relax_disc.cpu.recurrence`                  see `library_recurrence`
`relax_disc.cpu.recurrence_backward`         see `library_recurrence`
`relax_disc.cpu.sort`                        x, descending, values, positions
`relax_disc.cpu.vocabulary_head`             see `library_vocabulary_head`, also for the suffixes
`relax_disc.cpu.workspace_bytes`             formula, parameters -> bytes beside the arguments
`relax_disc.cpu.own_workspace_bytes`         () -> bytes kept for calls that were lent none
============================================ ====================================================

All tensors are compact, float32 or float64 alike within a call; results are written into the last.
A matrix operand of any rank counts its first `split` axes as rows and the others as columns.
An `axes` code is a permutation, one hexadecimal digit an axis: logical axis i of a batched
operand is axis `axes[i]` of the tensor as stored; the columns of c must be stored contiguously.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm_ffi

from relax_disc.vm_builtins import native, threads
from relax_disc.vm_builtins.libraries import (
    library_attention,
    library_ctc,
    library_recurrence,
    library_sort,
    library_vocabulary_head,
)
from relax_disc.vm_builtins.libraries.arrays import array_of, as_matrix, unpack_axes


@functools.cache
def install() -> bool:
    """Register every library function, once per process.

    Returns
    -------
    bool
        Whether the functions are the native ones.
    """
    threads.configure()
    is_native = native.load() is not None
    for name, function in TWINS.items():
        if tvm_ffi.get_global_func(name, allow_missing=True) is None:
            tvm_ffi.register_global_func(name, function)
    return is_native


def matmul(
    a: Any, b: Any, a_split: int, b_split: int, transpose_a: int, transpose_b: int, c: Any
) -> None:
    """Compute c = a' @ b' for matrices a', b' that are a, b or their transposes."""
    left = as_matrix(array_of(a), a_split, transpose_a)
    right = as_matrix(array_of(b), b_split, transpose_b)
    target = array_of(c)
    target[...] = (left @ right).reshape(target.shape)


def matmul_add(
    a: Any,
    b: Any,
    addend: Any,
    a_split: int,
    b_split: int,
    transpose_a: int,
    transpose_b: int,
    c: Any,
) -> None:
    """Compute c = a' @ b' + addend, which has as many elements as c or as one row of c."""
    left = as_matrix(array_of(a), a_split, transpose_a)
    right = as_matrix(array_of(b), b_split, transpose_b)
    extra, target = array_of(addend), array_of(c)
    rows = left.shape[0] if extra.size == target.size else 1
    product = left @ right + extra.reshape(rows, right.shape[1])
    target[...] = product.reshape(target.shape)


def batch_matmul(a: Any, b: Any, a_axes: int, b_axes: int, c_axes: int, c: Any) -> None:
    """Compute c = a @ b with broadcast batch axes, all three with permuted axes."""
    left, right, target = (
        array_of(tensor).transpose(unpack_axes(axes, len(tensor.shape)))
        for tensor, axes in ((a, a_axes), (b, b_axes), (c, c_axes))
    )
    target[...] = left @ right


def embedding_backward(grad: Any, ids: Any, padding_idx: int, out: Any) -> None:
    """Sum rows of `grad` by their id, in order, into `out`; ids equal to `padding_idx` are left."""
    target, rows = array_of(out), array_of(ids).reshape(-1)
    values = array_of(grad).reshape(rows.size, target.shape[1])
    target[...] = 0
    kept = rows != padding_idx
    np.add.at(target, rows[kept], values[kept])


def embedding_backward_add(grad: Any, ids: Any, addend: Any, padding_idx: int, out: Any) -> None:
    """Sum rows of `grad` by their id, in order, onto `addend`; `out` may be `addend` itself."""
    target, rows = array_of(out), array_of(ids).reshape(-1)
    values = array_of(grad).reshape(rows.size, target.shape[1])
    target[...] = array_of(addend)
    kept = rows != padding_idx
    np.add.at(target, rows[kept], values[kept])


def workspace_bytes(formula: str, numbers: Any) -> int:
    """Bytes that a kernel takes from its step's workspace; 0 for the twins."""
    del formula, numbers
    return 0


def own_workspace_bytes() -> int:
    """Bytes that threads keep for calls from outside a step; 0 for the twins."""
    return 0


TWINS: dict[str, Callable[..., Any]] = {
    "relax_disc.cpu.matmul": matmul,
    "relax_disc.cpu.matmul_add": matmul_add,
    "relax_disc.cpu.batch_matmul": batch_matmul,
    "relax_disc.cpu.attention": library_attention.attention,
    "relax_disc.cpu.attention_masked": library_attention.attention_masked,
    "relax_disc.cpu.attention_backward": library_attention.attention_backward,
    "relax_disc.cpu.attention_backward_masked": library_attention.attention_backward_masked,
    "relax_disc.cpu.ctc_loss": library_ctc.ctc_loss,
    "relax_disc.cpu.ctc_loss_backward": library_ctc.ctc_loss_backward,
    "relax_disc.cpu.embedding_backward": embedding_backward,
    "relax_disc.cpu.embedding_backward_add": embedding_backward_add,
    "relax_disc.cpu.recurrence": library_recurrence.recurrence,
    "relax_disc.cpu.recurrence_backward": library_recurrence.recurrence_backward,
    "relax_disc.cpu.sort": library_sort.sort,
    **{f"relax_disc.cpu.{name}": twin for name, twin in library_vocabulary_head.TWINS.items()},
    "relax_disc.cpu.workspace_bytes": workspace_bytes,
    "relax_disc.cpu.own_workspace_bytes": own_workspace_bytes,
}
