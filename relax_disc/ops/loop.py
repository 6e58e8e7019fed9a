"""The steps of a recurrence over a symbolic length, by a recipe in text.

``call_dps_packed("relax_disc.aten.loop", (recipe, bytes, *operands), results)`` is one kernel to
the planners, whatever the length.  A step is a flat list of PyTorch's operators; its values stand
in numbered slots.  ``bytes`` bounds what one step allocates.  The recipe is JSON::

    {"version": 1, "line": "model.py:12", "count": ["operand", 3], "reverse": false, "slots": 5,
     "inputs": [["carry", 0, 0, 4], ["step", 1, 1, 1, ["int", 1], ["int", 0]], ["whole", 2, 2]],
     "calls": [{"operator": "aten::mm", "overload": "", "arguments": [...], "slots": [3],
                "freed": [1]}],
     "results": [["carry", 0], ["stack", 4]], "kept": [4]}

Numbers are ``["int", value]`` or ``["operand", k]``, an operand that is an integer.  A position is
an axis and two numbers: ``factor * t + offset`` in step t.  Arguments are written as in
:mod:`relax_disc.ops.aten`, with slots for operands.

=========================== ======================================================================
``carry``, slot, k, next    operand k before the first step, slot ``next`` of the step before later
``step``, slot, k, position the part of operand k
``whole``, slot, k          operand k, a tensor or an integer
=========================== ======================================================================

A result is one of

================================ =================================================================
``carry``, k                     state k after the last step
``before``, k                    state k before each step, stacked
``stack``, slot                  a value of each step, stacked
``last``, slot                   a value of the last step
``write``, slot, k, position     operand k, with a value of each step in its position
``sum``, slot                    the sum of a value over the steps
``scatter``, slot, -1, position  zeros, with values added in each step's position
``erased``, 0, k, position       operand k, with zeros in each step's position
================================ =================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_disc.ops import registry

CALL = "relax_disc.aten.loop"
VERSION = 1


@dataclass(frozen=True, slots=True)
class LoopCall:
    """A call, without its operands that are tensors.

    ``operands``, ``results``: values without data. ``numbers``: operands behind the tensors, from
    the dims. ``step``: what a step touches of operands and results, and what its calls make.
    ``count``: of the steps.
    """

    recipe: str
    operands: tuple[Tensor, ...]
    numbers: tuple[Any, ...]
    results: tuple[Tensor, ...]
    step: tuple[Tensor, ...]
    count: Any


_CALLS: dict[int, LoopCall] = {}


def enter_call(call: LoopCall) -> int:
    """Enter a call; returned: the number by which ``loop_call`` names it."""
    _CALLS[len(_CALLS)] = call
    return len(_CALLS) - 1


def known_call(number: int) -> LoopCall:
    """Return the call that was entered under a number."""
    return _CALLS[number]


def _fake(call: int, operands: Sequence[Tensor]) -> list[Tensor]:
    results = known_call(call).results
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in results]


registry.traced("loop_call(int call, Tensor[] operands) -> Tensor[]", _fake)
