"""Keep a ``torch.autograd.Function`` whole while the model is exported: its gradient is its own.

torch.export records what a function computes and drops the gradient that it defines: a
straight-through estimator or a reversed gradient would silently train as something else.  Here a
call becomes one operator of the exported graph; the trace of gradients then makes the call itself,
and finds the operators of both directions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import function as autograd_function
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.recurrent_layers import refusal
from relax_disc.frontend.capture.state.live_number import LiveNumber, live_everywhere

OPERATOR = "relax_disc::custom_function"

torch.library.define(OPERATOR, "(int call, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")


@dataclass(frozen=True, slots=True)
class CustomCall:
    """One call of a function."""

    function: Any  # the subclass of ``torch.autograd.Function``
    leaves: tuple[Any, ...]  # its flattened arguments; None in the places of tensors and sizes
    # for each leaf ``"tensor"``, ``"number"`` (live: also a tensor of the call), ``"size"`` or
    # ``"plain"``
    kinds: tuple[str, ...]
    structure: pytree.TreeSpec  # of the arguments

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> Any:
        """Make the call with other tensors and sizes; whatever the function returns."""
        given = {"tensor": iter(tensors), "size": iter(sizes)}
        leaves: list[Any] = []
        for leaf, kind in zip(self.leaves, self.kinds, strict=True):
            if kind == "number":
                leaves.append(_live(leaf, next(given["tensor"])))
            else:
                leaves.append(leaf if kind == "plain" else next(given[kind]))
        return self.function.apply(*pytree.tree_unflatten(leaves, self.structure))


class CustomCalls:
    """The calls that an export has met, in their order."""

    def __init__(self) -> None:
        self._calls: list[CustomCall] = []
        self._returned: Any = None  # by the last call that was tried

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: int) -> CustomCall:
        """Return the call that a node of the graph names."""
        return self._calls[index]

    def record(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Put one operator into the graph instead of what a call computes."""
        leaves, structure = pytree.tree_flatten(args)
        kinds = tuple(_kind(leaf) for leaf in leaves)
        tensors, sizes, plain = [], [], list(leaves)
        for place, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
            if kind in ("tensor", "number"):
                tensors.append(leaf.make() if kind == "number" else leaf)
            if kind == "size":
                sizes.append(leaf)
            if kind in ("tensor", "size"):
                plain[place] = None
        self._calls.append(CustomCall(function, tuple(plain), kinds, structure))
        results = iter(_operator()(len(self._calls) - 1, tensors, sizes))
        returned, self._returned = self._returned, None
        return pytree.tree_map_only(Tensor, lambda _: next(results), returned)

    def tried(self, index: int, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """Try a call on tensors without values, as it is without gradients; its tensors."""
        call = self._calls[index]
        versions = [tensor._version for tensor in tensors]
        with _replaced(_original), torch.no_grad(), live_everywhere():
            self._returned = call.run(tensors, sizes)
        if versions != [tensor._version for tensor in tensors]:
            why = (
                "this torch.autograd.Function writes into its arguments; let it return new tensors"
            )
            raise refusal(call.function.__qualname__, why)
        leaves = pytree.tree_leaves(self._returned)
        return [torch.empty_like(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


_ACTIVE: list[CustomCalls] = []


def _operator() -> Any:
    return torch.ops.relax_disc.custom_function.default


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return "tensor"
    if type(leaf) is LiveNumber:
        return "number" if leaf.make is not None else "plain"
    return "size" if isinstance(leaf, torch.SymInt) else "plain"


def _live(number: LiveNumber, tensor: Tensor) -> LiveNumber:
    return LiveNumber(number.value, number.leaves, number.pin, lambda: tensor)


@torch.library.register_fake(OPERATOR)
def _(call: int, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
    return _ACTIVE[-1].tried(call, tensors, sizes)


@contextlib.contextmanager
def custom_functions() -> Iterator[CustomCalls]:
    """Record calls of the functions of libraries and models while this is active.

    Those of PyTorch itself, which belong to its operators, stay as they are, but for the one that
    stands for any other in a graph of TorchDynamo.  Models hold on to ``apply`` itself, so what
    that calls is replaced.
    """
    calls = CustomCalls()

    def record(function: Any, *args: Any) -> Any:
        is_torch = function.__module__.partition(".")[0] == "torch"
        if is_torch and function.__name__ != "ApplyTemplate":
            return _original(function, *args)
        return calls.record(function, args)

    _ACTIVE.append(calls)
    try:
        with _replaced(record):
            yield calls
    finally:
        _ACTIVE.pop()


def _original(function: Any, *args: Any) -> Any:
    return super(autograd_function._SingleLevelFunction, function).apply(*args)


def _replaced(apply: Any) -> Any:
    return patch.object(autograd_function._SingleLevelFunction, "apply", classmethod(apply))
