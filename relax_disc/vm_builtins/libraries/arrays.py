"""Arguments of library functions: arrays over the runtime's memory, matrices, left-out masks."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def array_of(tensor: Any) -> np.ndarray:
    """View a compact CPU tensor as a writable array that shares its memory.

    Parameters
    ----------
    tensor : tvm_ffi.Tensor
        Any compact tensor with a dtype that numpy knows.

    Returns
    -------
    numpy.ndarray
        Of the tensor's shape and dtype; valid as long as the tensor's memory.
    """
    shape = tuple(int(extent) for extent in tensor.shape)
    dtype = np.dtype(str(tensor.dtype))
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return np.frombuffer(memory, dtype).reshape(shape)


def as_matrix(values: Any, split: int, transpose: int) -> Any:
    """View a compact numpy array or torch tensor as a matrix, or as its transpose.

    Parameters
    ----------
    values : numpy.ndarray or torch.Tensor
        Of any rank.
    split : int
        How many axes, from the first, count as rows; the others are columns.
    transpose : int
        Whether rows and columns change places.
    """
    rows, columns = math.prod(values.shape[:split]), math.prod(values.shape[split:])
    matrix = values.reshape(rows, columns)
    return matrix.T if transpose else matrix


def without_mask(function: Callable[..., None], position: int) -> Callable[..., None]:
    """Make the form of an attention function that gets no mask: None takes its position."""

    def run(*arguments: Any) -> None:
        function(*arguments[:position], None, *arguments[position:])

    return run


def unpack_axes(code: int, rank: int) -> tuple[int, ...]:
    """Decode a permutation of axes, one hexadecimal digit per axis, first axis first."""
    return tuple(code >> 4 * (rank - 1 - i) & 15 for i in range(rank))


def pack_axes(axes: Sequence[int]) -> int:
    """Encode a permutation of at most 15 axes as `unpack_axes` decodes it."""
    code = 0
    for axis in axes:
        code = code << 4 | axis
    return code
