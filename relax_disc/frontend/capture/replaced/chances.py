"""Random numbers that are compared with a probability: ``torch.rand(1) < p``.

Where ``p`` is 0 or 1 each call goes one way (but for a draw of exactly 0 above a ``p`` of 0, one in
2^24, which takes the same way).  For any other, code that only chooses between two values computes
both (:mod:`relax_disc.frontend.capture.loops.choices`); what else branches on it, as LayerDrop
does, is refused: one compiled program goes one way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
        # a comparison, with what (None: a number that may differ in each call), whether for less
        self._compared: list[tuple[Tensor, float | None, bool]] = []

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Look at a call and its result."""
        if func is torch.rand:
            if all(type(n) is int and n == 1 for n in result.shape):
                self._draws.append(result)
        elif (func in _LESS or func in _MORE) and len(args) == 2:
            drawn, other = args
            if any(drawn is draw for draw in self._draws):
                number = float(other) if type(other) in (int, float) else None
                if number is not None or (isinstance(other, Tensor) and other.dim() == 0):
                    self._compared.append((result, number, func in _LESS))

    def truth(self, x: Tensor) -> bool | None:
        """Return what a comparison comes to, where the number decides it; None for other tensors.

        Raises `UnsupportedOperatorError`: the random number decides.
        """
        _, other, is_less = self._found(x)
        if is_less is None or other is None:
            return None  # and PyTorch refuses; the number is tried as it is now
        if 0 < other < 1:
            raise refusal(
                f"a branch on whether a random number is below {other:g}",
                "as LayerDrop and module dropout have; a compiled step goes one way. Set the "
                "chance to 0 (`config.layerdrop = 0.0`, say), or choose between two tensors of "
                "one shape with torch.where",
            )
        return (other >= 1) is is_less

    def decide(self, condition: Any) -> bool:
        """Whether a condition is such a comparison, true in one call and false in another."""
        if not isinstance(condition, Tensor):
            return False
        _, other, is_less = self._found(condition)
        return is_less is not None and (other is None or 0 < other < 1)

    def _found(self, x: Tensor) -> tuple[Any, float | None, bool | None]:
        return next((each for each in self._compared if each[0] is x), (None, None, None))


_NOTED: list[Chances] = [Chances()]


@contextlib.contextmanager
def noted_chances() -> Iterator[Chances]:
    """Note those of one trace, which `active` returns meanwhile."""
    _NOTED.append(Chances())
    try:
        yield _NOTED[-1]
    finally:
        _NOTED.pop()


def active() -> Chances:
    """Return the notes of the trace that goes on."""
    return _NOTED[-1]
