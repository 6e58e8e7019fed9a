"""Which values lie in the memory of a tensor that a loop writes into."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.loops.sequences import is_same_shape
from relax_disc.frontend.capture.source_lines import is_entry, is_models


def sharing(tensor: Tensor, values: Mapping[str, Any]) -> Iterator[str]:
    """Name the values that are, or hold, a tensor in the memory of another."""
    memory = _memory(tensor)
    for what, value in values.items():
        leaves = pytree.tree_leaves(value)
        if any(isinstance(leaf, Tensor) and _memory(leaf) == memory for leaf in leaves):
            yield what


def callers_values() -> dict[str, Any]:
    """Return the variables of the model's functions that wait for the one that a loop is in."""
    frame: Any = sys._getframe(1)
    while not is_models(frame.f_code.co_filename):
        frame = frame.f_back
    found, frame = {}, frame.f_back
    while frame is not None:
        code = frame.f_code
        is_last = is_entry(code.co_name, code.co_filename)
        if is_last or is_models(code.co_filename):
            found |= {f"{key} of {id(frame)}": value for key, value in frame.f_locals.items()}
        frame = None if is_last else frame.f_back
    return found


def is_whole(new: Any, old: Tensor) -> bool:
    """Whether a value is all of another, in its memory."""
    return new is old or (
        isinstance(new, Tensor)
        and is_same_shape(new.shape, old.shape)
        and new.is_contiguous()
        and _memory(new) == _memory(old)
    )


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():  # the watch over the user's code is not told
        return tensor.untyped_storage()._cdata
