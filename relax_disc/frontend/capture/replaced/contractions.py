"""Products of three or more tensors, whose order opt_einsum plans: einsum, multi_dot.

opt_einsum compares numbers, and so does multi_dot, which would fix every size at the example's.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import opt_einsum

from relax_disc.frontend.capture.sizes.exact import example_size

_UNKNOWN = 64
"""Stands for a size that data tell, which the example does not know."""


def _einsum(equation: str, *operands: Any) -> Tensor | None:
    """Multiply in the order that is best at the example's sizes, which is right at all."""
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    planner = opt_einsum.get_opt_einsum()
    if planner is None or not opt_einsum.enabled or len(operands) <= 2:
        return None
    shapes = [tuple(example_size(n) or _UNKNOWN for n in tensor.shape) for tensor in operands]
    pairs, _ = planner.contract_path(equation, *shapes, shapes=True, optimize=opt_einsum.strategy)
    return torch._VF.einsum(equation, operands, path=[*itertools.chain.from_iterable(pairs)])


def _multi_dot(tensors: Any) -> Tensor:
    """Multiply matrices; the first and the last may be vectors.

    Without opt_einsum from left to right, as einsum does.
    """
    tensors = tuple(tensors)
    ends = [*itertools.accumulate((each.dim() - 1 for each in tensors), initial=0)]
    names = [
        string.ascii_letters[end : end + each.dim()]
        for end, each in zip(ends, tensors, strict=False)
    ]
    around = names[0][:-1] + names[-1][1:]
    equation = f"{','.join(names)}->{around}"
    made = _einsum(equation, *tensors)
    return torch._VF.einsum(equation, tensors) if made is None else made


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.einsum: _einsum,
    torch.linalg.multi_dot: _multi_dot,
}
