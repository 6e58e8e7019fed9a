"""Masks that are written twice, ``loss(y[k == 0], x[k == 0])``: the second is taken for the first.

Each mask that picks has a size of its own in a trace, and PyTorch's losses ask whether those of
their operands are equal.  Two that are computed alike of the same tensors are one mask, as long as
nothing is written into them or into what they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.versions import times_written

_TRUTHS = (
    "eq ne lt le gt ge less less_equal greater greater_equal not_equal isnan isinf isfinite bool "
    "logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or bitwise_xor "
    "and or xor invert"
)
_VIEWS = "getitem select squeeze unsqueeze view reshape flatten expand expand_as t transpose"
_MAKING = frozenset((*_TRUTHS.split(), *_VIEWS.split()))
"""Functions without the underscores of methods: truths of elements, and other shapes of them."""

_PICKING = (
    *(Tensor.__getitem__, Tensor.masked_select, torch.masked_select),
    *(Tensor.nonzero, torch.nonzero, torch.where),
)


class EqualMasks:
    """Notes how the tensors of a trace are made, of those that may lead to a mask."""

    def __init__(self) -> None:
        # The first that was made so, its version then, and what it was made of.
        self._made: dict[Any, tuple[Tensor, int, Any]] = {}
        # By the place of another one: the first and its version, that one and its version.
        self._firsts: dict[int, tuple[Tensor, int, Tensor, int]] = {}

    def note(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        """Look at a call and its result."""
        name = getattr(func, "__name__", "").strip("_")
        if name not in _MAKING or kwargs or not isinstance(result, Tensor):
            return
        leaves, structure = pytree.tree_flatten(_plain(args))
        key = name, structure, *map(self._name, leaves)
        if None in key:
            return
        version = times_written(result)
        first, its_version, _ = self._made.setdefault(key, (result, version, args))
        if first is not result:
            self._firsts[id(result)] = first, its_version, result, version

    def with_firsts(self, func: Any, args: Sequence[Any]) -> Sequence[Any]:
        """Put the first of equal masks in the places of the others, where a call picks by them."""
        if func not in _PICKING or not self._firsts:
            return args

        def first(x: Tensor) -> Tensor:
            # What is picked from may have a gradient here that the first had not.
            return x if x.is_floating_point() or x.is_complex() else self._first(x)

        return pytree.tree_map_only(Tensor, first, args)

    def _first(self, x: Tensor) -> Tensor:
        found = self._firsts.get(id(x))
        if found is None or found[2] is not x:
            return x
        first, its_version, _, version = found
        is_same = times_written(x) == version and times_written(first) == its_version
        return first if is_same else x

    def _name(self, leaf: Any) -> Any:
        """Name a tensor as it is now, a number or a size; None: anything else."""
        if isinstance(leaf, Tensor):
            first = self._first(leaf)
            return "tensor", id(first), times_written(first)
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return "size", str(leaf.node.expr)
        plain = bool | int | float | str | torch.dtype | type(None) | type(Ellipsis)
        return (type(leaf), repr(leaf)) if isinstance(leaf, plain) else None


def _plain(args: Any) -> Any:
    """Write slices as tuples."""
    if isinstance(args, slice):
        return "slice", _plain(args.start), _plain(args.stop), _plain(args.step)
    return type(args)(map(_plain, args)) if isinstance(args, tuple | list) else args
