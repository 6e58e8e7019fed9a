"""The number of a step where its body computes with it: an element of all those numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import TensorReferenceAnalysis

from relax_disc.frontend.capture.loops.recorded import RecordedLoops, active


def numbers_as_tensors(args: Sequence[Any]) -> Sequence[Any]:
    """Put numbers that a step makes of sizes or of its own number into a call as tensors.

    They have no axes, and the type of the result is what it would be with the number.
    """
    loops = active()
    if loops is None or loops.inside is None:
        return args
    tensors = [x for x in args if isinstance(x, Tensor)]
    return tuple(_as_tensor(x, tensors, loops) for x in args)


def _as_tensor(value: Any, tensors: Sequence[Tensor], loops: RecordedLoops) -> Any:
    if not tensors or not isinstance(value, torch.SymInt | torch.SymFloat):
        return value
    number: Any = value
    is_whole, of_step = isinstance(value, torch.SymInt), _is_of_step(value, loops)
    if is_whole and not of_step:
        return value
    device = tensors[0].device
    made = torch.int64 if is_whole else torch.float64
    if of_step:
        number = _of_all_steps(value, loops, device).to(made).select(0, loops.step)
    else:
        number = torch.scalar_tensor(number, dtype=made, device=device)
    if any(x.dim() and x.is_floating_point() for x in tensors):
        return number  # it does not raise their type, and is not rounded to it
    return number.to(torch.result_type(tensors[0], 1 if is_whole else 1.0))


def _of_all_steps(value: Any, loops: RecordedLoops, device: torch.device) -> Tensor:
    """Compute a number for each step, ``[count]``."""
    symbol: Any = loops.step.node.expr
    expression: Any = value.node.expr
    env: Any = value.node.shape_env
    known: dict[Any, Any] = {symbol: torch.arange(loops.count, device=device)}
    for size in expression.free_symbols - {symbol}:
        number = env.create_symintnode(size, hint=int(env.backed_var_to_val[size]))
        known[size] = torch.scalar_tensor(number, dtype=torch.int64, device=device)
    return sympy_interp(TensorReferenceAnalysis, known, expression)


def _is_of_step(value: Any, loops: RecordedLoops) -> bool:
    return bool(loops.step.node.expr in value.node.expr.free_symbols)
