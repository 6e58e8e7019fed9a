"""Let ``len(tensor)`` follow the shape while a model is exported.

Python's ``len`` returns a plain number, so that ``torch.arange(len(logits))`` would fix the batch
to the size of the example.  Model files see another ``len`` for as long as the export lasts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_ABSENT = object()


def _length(value: Any) -> Any:
    """``len``, but the symbolic extent of a tensor."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value.shape[0]
    return len(value)


@contextlib.contextmanager
def symbolic_len(model: nn.Module, *functions: Callable[..., Any] | None) -> Iterator[None]:
    """Replace ``len`` in the files that define the model's classes and the functions.

    Parameters
    ----------
    model : torch.nn.Module
        PyTorch's own files are left alone.
    *functions : callable or None
        Others that are exported, a loss function say.
    """
    called = [type(module).forward for module in model.modules()]
    spaces: dict[int, dict[str, Any]] = {}
    for function in [*called, *functions]:
        function = inspect.unwrap(function) if function is not None else None
        space = getattr(function, "__globals__", None)
        if space is not None and not str(space.get("__name__", "")).startswith("torch."):
            spaces[id(space)] = space
    before = [(space, space.get("len", _ABSENT)) for space in spaces.values()]
    for space, own in before:
        if own is _ABSENT:
            space["len"] = _length
    try:
        yield
    finally:
        for space, own in before:
            if own is _ABSENT:
                del space["len"]
