"""Which operators of an exported graph are traced whole, and the conditions under which they are.

Each rule takes the operator's own arguments and returns its result built from the torch operators
of :mod:`relax_disc.ops`, or ``None``: "not mine", the operator is then decomposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.rewrites import REWRITES
from relax_disc.ops.registry import KEPT

Rule = Callable[..., Any]


def under_autocast(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Convert the operands as autocast would: its rules know ATen's operators, not ours.

    On the CPU it runs attention in its lower precision and cross-entropy in float32.
    """
    if not torch.is_autocast_enabled("cpu"):
        return args, kwargs
    chosen = {
        torch.ops.aten.scaled_dot_product_attention.default: torch.get_autocast_dtype("cpu"),
        torch.ops.aten.cross_entropy_loss.default: torch.float32,
    }
    if target not in chosen:
        return args, kwargs

    def convert(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(chosen[target]) if eligible else tensor

    return pytree.tree_map_only(Tensor, convert, (args, kwargs))


RULES: dict[Any, Rule] = {
    **KEPT,
    **REWRITES,
}
