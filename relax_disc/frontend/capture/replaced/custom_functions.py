"""Keep a ``torch.autograd.Function`` whole while the model is exported: its gradient is its own.

torch.export records what a function computes and drops the gradient that it defines: a
straight-through estimator or a reversed gradient would silently train as something else.  Here a
call becomes one operator of the exported graph; the trace of gradients then makes the call itself,
and finds the operators of both directions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import function as autograd_function
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.refusals import refusal
from relax_disc.frontend.capture.source_lines import asks_by_itself
from relax_disc.frontend.capture.state.kinds import is_plain
from relax_disc.frontend.capture.state.live_number import LiveNumber, live_everywhere

_UNSEEN = (
    "inside a torch.autograd.Function, whose `except` would hide that one compiled program cannot "
    "follow it; choose by torch.where"
)
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
        return self.function.apply(*self.arguments(tensors, sizes))

    def is_like(self, other: CustomCall) -> bool:
        """Whether another call is of the same function, and what is no tensor or size is equal."""
        pairs = zip(self.leaves, other.leaves, strict=False)
        return (
            self.function is other.function
            and self.kinds == other.kinds
            and self.structure == other.structure
            and all(
                kind != "plain" or _are_one(*pair)
                for kind, pair in zip(self.kinds, pairs, strict=False)
            )
        )

    def arguments(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Return the function's arguments, with other tensors and sizes."""
        given = {"tensor": iter(tensors), "size": iter(sizes)}
        leaves: list[Any] = []
        for leaf, kind in zip(self.leaves, self.kinds, strict=True):
            if kind == "number":
                leaves.append(_live(leaf, next(given["tensor"])))
            else:
                leaves.append(leaf if kind == "plain" else next(given[kind]))
        return pytree.tree_unflatten(leaves, self.structure)


def _are_one(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal numbers, texts and the like."""
    return one is other or (type(one) is type(other) and is_plain(one) and bool(one == other))


class CustomCalls:
    """The calls that an export has met, in their order."""

    def __init__(self) -> None:
        self._calls: list[CustomCall] = []
        self._returned: Any = None  # by the last call that was tried

    def __len__(self) -> int:
        return len(self._calls)

    def are_like(self, others: CustomCalls) -> bool:
        """Whether other calls are as many, and one by one like these."""
        pairs = zip(self._calls, others._calls, strict=False)
        return len(self) == len(others) and all(one.is_like(other) for one, other in pairs)

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
        arguments = call.arguments(tensors, sizes)
        before = _held_by(arguments)
        with _replaced(_original), torch.no_grad(), live_everywhere(), answered_questions():
            self._returned = call.function.apply(*arguments)
        name, after = call.function.__qualname__, _held_by(arguments)
        if versions != [tensor._version for tensor in tensors]:
            why = (
                "this torch.autograd.Function writes into its arguments; let it return new tensors"
            )
            raise refusal(name, why)
        changed = before.keys() ^ after.keys()
        changed |= {key for key in before.keys() & after.keys() if before[key] is not after[key]}
        if changed:
            kinds = " and ".join(sorted({type(arguments[key[0]]).__name__ for key in changed}))
            why = (
                f"this torch.autograd.Function changes what it is given ({kinds}); let it return "
                "what it computes, and switch caches off (use_cache=False)"
            )
            raise refusal(name, why)
        leaves = pytree.tree_leaves(self._returned)
        return [torch.empty_like(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


_ACTIVE: list[CustomCalls] = []


@contextlib.contextmanager
def answered_questions() -> Iterator[None]:
    """Raise what no trace can tell a user's function, even where its own ``except`` hides that.

    Raises `UnsupportedOperatorError`: names the line of the first question that data would answer.
    """
    before = ShapeEnv.evaluate_sym_node
    refused: list[UnsupportedOperatorError] = []

    def asked(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        try:
            return before(self, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if asks_by_itself(sys._getframe(1)):
                refused.append(refusal("the model decides from data", _UNSEEN))
            raise

    with patch.object(ShapeEnv, "evaluate_sym_node", asked):
        yield
    if refused:
        raise refused[0]


def _operator() -> Any:
    return torch.ops.relax_disc.custom_function.default


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return "tensor"
    if type(leaf) is LiveNumber:
        return "number" if leaf.make is not None else "plain"
    return "size" if isinstance(leaf, torch.SymInt) else "plain"


_OPAQUE = (torch.nn.Module, Tensor, LiveNumber, torch.SymInt, torch.SymFloat, torch.SymBool, type)


def _held_by(value: Any) -> dict[tuple[Any, ...], Any]:
    """Return what arguments hold, by where: in containers and in attributes of plain objects."""
    found: dict[tuple[Any, ...], Any] = {}
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    seen = set()
    while waiting:
        path, value = waiting.pop()
        found[path] = value
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            parts = value
        elif isinstance(value, list | tuple):
            parts = dict(enumerate(value))
        else:
            parts = {} if callable(value) else getattr(value, "__dict__", {})
        waiting += [((*path, key), part) for key, part in parts.items()]
    return found


def _live(number: LiveNumber, tensor: Tensor) -> LiveNumber:
    return LiveNumber(number.value, number.leaves, number.pin, lambda: tensor)


@torch.library.impl(OPERATOR, ("CPU", "CUDA"))
def _(call: int, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
    """Compute a call on the example batch, whose data decide a branch."""
    with _replaced(_original), torch.no_grad(), live_everywhere():
        returned = _ACTIVE[-1][call].run(tensors, sizes)
    return [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]


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
