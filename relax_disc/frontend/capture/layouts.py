"""Give the result of an operator that is traced in another form the layout of the exported one.

An exported graph has no ``contiguous()`` where the operator's own result was contiguous in that
order of axes, and goes on with a view: ``attention(...).transpose(1, 2).contiguous().view(...)``.
Layouts are of the trace alone; in Relax the copy made here is a view or nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def laid_out_like(result: Any, recorded: Any) -> Any:
    """Copy a tensor into the layout that was recorded, where that differs and has no gaps.

    Parameters
    ----------
    result : Tensor or anything else
        What stands in for the operator's result.
    recorded : Tensor or anything else
        The result that the export recorded, of the same shape; its sizes may be symbols.

    Returns
    -------
    Tensor or anything else
        ``result`` itself, unless both are tensors whose strides differ.
    """
    if not isinstance(result, Tensor) or not isinstance(recorded, Tensor):
        return result
    shapes = [[_text(size) for size in tensor.shape] for tensor in (result, recorded)]
    if shapes[0] != shapes[1] or _same_strides(result, recorded):
        return result
    hints = [_hint(stride) for stride in recorded.stride()]
    if any(hint is None for hint in hints):
        return result
    order = sorted(range(recorded.dim()), key=lambda axis: (-(hints[axis] or 0), axis))
    back = [order.index(axis) for axis in range(recorded.dim())]
    copy = result.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    return copy if _same_strides(copy, recorded) else result


def _same_strides(left: Tensor, right: Tensor) -> bool:
    each = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(_text(size) == "1" or _text(a) == _text(b) for size, a, b in each)


def _text(size: int | torch.SymInt) -> str:
    """Compare symbols as they are written: asking PyTorch would be one more guard."""
    return str(size.node.expr if isinstance(size, torch.SymInt) else size)


def _hint(size: int | torch.SymInt) -> int | None:
    if not isinstance(size, torch.SymInt):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)
