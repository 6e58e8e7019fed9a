"""Choices by a random number, as teacher forcing makes them: both values are computed, one taken.

:mod:`.choice_source` writes a model's code so that it calls these.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.loops.recorded import known_modules
from relax_disc.frontend.capture.loops.steps import UNBOUND, are_alike
from relax_disc.frontend.capture.replaced import chances
from relax_disc.frontend.capture.source_lines import source_line
from relax_disc.frontend.capture.versions import times_written

# Conditions whose sides are being computed, and how often buffers were written before them.
_asked: list[tuple[Any, list[int]]] = []


def by_chance(condition: Any) -> bool:
    """Whether to compute both sides of a choice; the condition is kept for the call after it."""
    is_by_chance = chances.active().decide(condition)
    _asked.append((condition, _writes() if is_by_chance else []))
    return is_by_chance


def decided() -> Any:
    """Return the condition that `by_chance` was asked about last."""
    return _asked.pop()[0]


def chosen(first: Any, second: Any) -> Any:
    """Choose one of two values by the condition that `by_chance` was asked about last."""
    return _choice(_computed(), first, second)


def bound(found: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Return what names hold."""
    return tuple(found.get(name, UNBOUND) for name in names)


def either(first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, ...]:
    """Choose what each of several names holds, as `chosen` does."""
    condition = _computed()
    return tuple(_choice(condition, *both) for both in zip(first, second, strict=True))


def _computed() -> Any:
    """Return the condition whose sides were computed, if that has written no buffer.

    Raises as a branch on it does where a side has, as a layer's batch norm does.
    """
    condition, before = _asked.pop()
    if before != _writes():
        bool(condition)  # raises
    return condition


def _writes() -> list[int]:
    return [times_written(x) for module in known_modules() for x in module.buffers(recurse=False)]


def _choice(condition: Tensor, first: Any, second: Any) -> Any:
    """Take ``first`` where the condition holds, else ``second``; or what only one side binds.

    Raises as a branch on it does where they are no tensors of one shape and type.
    """
    if first is second or second is UNBOUND:
        return first
    if first is UNBOUND:
        return second
    if first is True and second is False:
        return condition
    if not are_alike(first, second):
        bool(condition)  # raises
    where = torch.ops.relax_disc.by_chance(condition.reshape(()))
    return pytree.tree_map(lambda x, y: torch.where(where, x, y), first, second)


CHOICES = (by_chance, decided, chosen, bound, either)


torch.library.define("relax_disc::by_chance", "(Tensor condition) -> Tensor")
torch.library.register_fake("relax_disc::by_chance", torch.empty_like)


def settle_choices(program: ExportedProgram) -> UnsupportedOperatorError | None:
    """Take the marks of choices out of a graph.

    Returned: why the program is refused, if a parameter is trained through one side of choices
    alone.  Eager PyTorch leaves it without a gradient, and so as it is, where no step takes that
    side.
    """
    module, refusal = program.graph_module, None
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        marks = part.graph.find_nodes(op="call_function", target=_BY_CHANCE)
        if part is module:
            refusal = _untrained(part.graph, marks, program.graph_signature.inputs_to_parameters)
        for mark in marks:
            mark.replace_all_uses_with(mark.args[0])
            part.graph.erase_node(mark)
        if marks:
            part.recompile()
    return refusal


_BY_CHANCE = torch.ops.relax_disc.by_chance.default


def _untrained(
    graph: fx.Graph, marks: Sequence[fx.Node], names: Mapping[str, str]
) -> UnsupportedOperatorError | None:
    sides = {choice: choice.args[1:] for mark in marks for choice in mark.users}
    result = graph.output_node().all_input_nodes
    anyhow = _trained_by(result, sides)
    for choice, (first, second) in sides.items():
        first, second = _trained_by([first]), _trained_by([second])
        alone = [node for node in (first ^ second) - anyhow if node.name in names]
        if alone:
            line = source_line(choice)
            name = min(names[node.name] for node in alone).removeprefix("model.")
            return UnsupportedOperatorError(
                f"{line}: a random number chooses whether {name} is trained: it is read by one of "
                "the two values alone, and eager PyTorch leaves it without a gradient where only "
                "the other is taken. Read it on both sides, or set its requires_grad to False.",
                (("a choice by chance", str(line)),),
            )
    return None


def _trained_by(nodes: Iterable[Any], without: Mapping[fx.Node, Any] = {}) -> set[fx.Node]:
    """Find the inputs that gradients of values reach, not through the nodes of ``without``."""
    seen: set[fx.Node] = set()
    left = [node for node in nodes if isinstance(node, fx.Node)]
    while left:
        node = left.pop()
        if node in seen or node in without or not _has_gradient(node):
            continue
        seen.add(node)
        left += _sources(node)
    return {node for node in seen if node.op == "placeholder" and node.meta["val"].requires_grad}


def _sources(node: fx.Node) -> Sequence[fx.Node]:
    """List what a value is made of; one that a loop returns is made of what the loop carries."""
    if node.target is not operator.getitem:
        return node.all_input_nodes
    end, place = node.args
    if not isinstance(end, fx.Node) or end.target is not torch.ops.relax_disc.loop_end.default:
        return node.all_input_nodes
    _, _, news, fresh, stacked, _ = end.args
    return [*news, [*news, *fresh, *stacked][place]]  # pyright: ignore


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    is_whole = isinstance(value, Tensor) and not value.is_floating_point()
    return not is_whole and getattr(node.target, "_opname", "") != "detach"
