"""Random numbers of a loop's steps: drawn for all steps before it, of which each reads its own.

A step is repeated, so what it draws by itself would be the same numbers each time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.loops.nodes import add_call, add_size, values_of
from relax_disc.frontend.capture.traced.writes import is_new
from relax_disc.frontend.random_ops import RandomOperators

_ATEN = torch.ops.aten
_RANDOM = torch.Tag.nondeterministic_seeded


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers; dropout in evaluation draws none."""
    target = node.target
    if not isinstance(target, OpOverload) or _RANDOM not in target.tags:
        return False
    if target is _ATEN.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0))
    return "dropout" not in target._schema.name or not (node.args[1] == 0 or node.args[2] is False)


def once_inside(node: fx.Node) -> tuple[str, fx.Node] | None:
    """Find what a region that a call enters, such as one without gradients, must not do once.

    Returned: what it does, and the node; None where a loop may have the region computed before it.
    """
    held = [operator.attrgetter(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    regions = [get(node.graph.owning_module) for get in held]
    parts = [part for x in regions if isinstance(x, fx.GraphModule) for part in x.modules()]
    for part in parts:
        for each in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if is_random(each):
                return "draws random numbers", each
            if isinstance(each.target, OpOverload) and each.target._schema.is_mutable:
                return "writes into a tensor", each
    return None


class _Asked(RandomOperators):
    """Notes which numbers a random operator asks for: a shape, and for masks a probability."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.asked: list[tuple[Sequence[Any], float | None]] = []

    def uniform(self, shape: Sequence[Any]) -> Tensor:
        self.asked.append((shape, None))
        return torch.empty(tuple(shape), dtype=torch.float32, device=self._device)

    def keep(self, shape: Sequence[Any], p: float) -> Tensor:
        self.asked.append((shape, p))
        return torch.empty(tuple(shape), dtype=torch.bool, device=self._device)


class _Given(RandomOperators):
    """Gives a random operator the numbers that were drawn for it."""

    def __init__(self, given: Iterator[Tensor]) -> None:
        self._given = given

    def uniform(self, shape: Sequence[Any]) -> Tensor:
        return next(self._given)

    def keep(self, shape: Sequence[Any], p: float) -> Tensor:
        return next(self._given)


@dataclass(frozen=True)
class DrawnOperator:
    """A random operator as a function of the numbers that it draws; it writes nothing."""

    operator: OpOverload

    @property
    def __name__(self) -> str:
        return f"drawn_{self.operator}"

    def __call__(self, given: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Apply the operator to its own arguments; ``given``: numbers in the order it asks."""
        return _draw(self.operator, _Given(iter(given)), args, kwargs)


def _draw(target: OpOverload, numbers: RandomOperators, args: Any, kwargs: Any) -> Any:
    if target._schema.is_mutable:
        args = (args[0].clone(), *args[1:])
    return numbers.rules()[target](*args, **kwargs)


def draw_before(
    index: fx.Node, step: fx.Node, node: fx.Node, refuse: Callable[[str, fx.Node], Exception]
) -> None:
    """Let a random operator of a step read numbers that are drawn for all steps before the first.

    ``index``: where the loop begins. ``step``: the number of the step, in the graph.
    Raises what ``refuse`` makes of a reason.
    """
    graph, mode = node.graph, index.meta["val"].fake_mode
    target: Any = node.target
    device = next(x.device for x in pytree.tree_leaves(node.meta["val"]) if isinstance(x, Tensor))
    asked = _Asked(device)
    known = target in asked.rules()
    if known:
        with mode:
            made = _draw(target, asked, values_of(node.args), values_of(dict(node.kwargs)))
        known = made is not None
    if not known:
        raise refuse(f"{target} inside it draws random numbers; draw them before the loop", node)
    if target._schema.is_mutable:
        _check_filled(node, refuse)
    given = []
    for shape, p in asked.asked:
        with graph.inserting_before(index):
            sizes = [index.args[1], *(add_size(index, size) for size in shape)]
            if None in sizes:
                raise refuse("how many random numbers it draws is not known before it", node)
            options = {"dtype": torch.float32, "device": device}
            drawn = add_call(graph, mode, _ATEN.rand.default, sizes, **options)
            if p is not None:
                drawn = add_call(graph, mode, _ATEN.ge.Scalar, drawn, p)
        with graph.inserting_before(node):
            given.append(add_call(graph, mode, _ATEN.select.int, drawn, 0, step))
    with graph.inserting_before(node):
        made = graph.call_function(DrawnOperator(target), (given, *node.args), dict(node.kwargs))
    made.meta = dict(node.meta)
    if target._schema.is_mutable:
        filled: Any = node.args[0]
        for user in [user for user in filled.users if user > node]:
            user.replace_input_with(filled, made)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _check_filled(node: fx.Node, refuse: Callable[[str, fx.Node], Exception]) -> None:
    """Check that a tensor that is filled with random numbers has no other name."""
    filled: Any = node.args[0]
    if not is_new(filled) or not all(user is node or is_new(user) for user in filled.users):
        raise refuse("it fills with random numbers a tensor that may have other names", node)
