"""Branches on a random number: ``if torch.rand(1) < p``, as LayerDrop and module dropout have.

Where ``p`` is 0 or 1 each call goes one way (but for a draw of exactly 0 above a ``p`` of 0, one in
2^24, which takes the same way).  Any other is refused: one compiled program goes one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relax_disc.frontend.capture.refusals import refusal

_LESS = frozenset((torch.lt, torch.le, Tensor.lt, Tensor.le, Tensor.__lt__, Tensor.__le__))
_MORE = frozenset((torch.gt, torch.ge, Tensor.gt, Tensor.ge, Tensor.__gt__, Tensor.__ge__))


class Chances:
    """Notes of the single random numbers of a trace, and of what they were compared with."""

    def __init__(self) -> None:
        self._draws: list[Tensor] = []
        self._compared: list[tuple[Tensor, float, bool]] = []  # with what, and whether for less

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Look at a call and its result."""
        if func is torch.rand:
            if all(type(n) is int and n == 1 for n in result.shape):
                self._draws.append(result)
        elif (func in _LESS or func in _MORE) and len(args) == 2:
            drawn, other = args
            if type(other) in (int, float) and any(drawn is draw for draw in self._draws):
                self._compared.append((result, float(other), func in _LESS))

    def truth(self, x: Tensor) -> bool | None:
        """Return what a comparison comes to, where the number decides it; None for other tensors.

        Raises `UnsupportedOperatorError`: the random number decides.
        """
        found = (each for each in self._compared if each[0] is x)
        _, other, is_less = next(found, (None, 0.0, None))
        if is_less is None:
            return None
        if 0 < other < 1:
            raise refusal(
                f"a branch on whether a random number is below {other:g}",
                "as LayerDrop and module dropout have; a compiled step goes one way. Set the "
                "chance to 0 (`config.layerdrop = 0.0`, say), or choose with torch.where",
            )
        return (other >= 1) is is_less
