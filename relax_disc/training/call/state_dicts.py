"""The dicts in which an optimizer keeps its state, found without asking for each by its parameter.

A tensor's hash is a function of Python's, which a step would call several times a parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

_WATCHES: weakref.WeakKeyDictionary[Optimizer, StateDicts] = weakref.WeakKeyDictionary()


def state_dicts(optimizer: Optimizer) -> Mapping[int, Any]:
    """Return the dict of each parameter that has state, by the parameter's `id`."""
    if optimizer not in _WATCHES:
        _WATCHES[optimizer] = StateDicts()
    return _WATCHES[optimizer].of(optimizer.state)


class StateDicts:
    """What was found last, which holds as long as keys and values are the same objects."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[Any] = []
        self._by_id: dict[int, Any] = {}

    def of(self, state: Mapping[torch.Tensor, Any]) -> Mapping[int, Any]:
        """Return the values of a state by the `id` of their keys."""
        if (
            len(state) != len(self._keys)
            or not all(map(is_, state.values(), self._values))
            or not all(map(is_, state, self._keys))
        ):
            self._keys, self._values = list(state), list(state.values())
            self._by_id = dict(zip(map(id, self._keys), self._values, strict=True))
        return self._by_id
