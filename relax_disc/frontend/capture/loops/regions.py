"""Regions with and without gradients inside a loop's step, as part of the step.

An export makes a graph of its own of ``with torch.no_grad(): ...``.  What such a region gives back
has no gradient, which is what ``detach`` says of its results.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from relax_disc.frontend.capture.loops.nodes import may_share_memory

_ATEN = torch.ops.aten
_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_regions(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> bool:
    """Put what regions compute in their places, of those among some nodes of a module.

    Regions that write into tensors of others, or hold regions of another kind, stay as they are.
    Returned: whether one has been put in its place.
    """
    inlined = [node for node in nodes if node.target is _REGION and _inline(module, node)]
    return bool(inlined)


def _inline(module: fx.GraphModule, call: fx.Node) -> bool:
    held: Any
    with_gradients, held, *operands = call.args
    region: Any = module.get_submodule(str(held.target))
    inline_regions(region, list(region.graph.nodes))
    if any(node.op == "get_attr" or _writes_outside(node) for node in region.graph.nodes):
        return False
    if any(user.target is not operator.getitem for user in call.users):
        return False
    inputs = (node for node in region.graph.nodes if node.op == "placeholder")
    copies: dict[fx.Node, Any] = dict(zip(inputs, operands, strict=True))
    graph = call.graph
    with graph.inserting_before(call):
        results: Any = graph.graph_copy(region.graph, copies)
        made = list(region.graph.output_node().args[0])
        for user in list(call.users):
            place: Any = user.args[1]
            result = results[place]
            if not with_gradients and _is_made(made[place]):
                result = graph.call_function(_ATEN.detach.default, (result,))
                result.meta = dict(user.meta)
            user.replace_all_uses_with(result)
            graph.erase_node(user)
    graph.erase_node(call)
    if not held.users:
        graph.erase_node(held)
    return True


def _is_made(node: fx.Node) -> bool:
    """Whether a region makes a tensor that could have a gradient."""
    value = node.meta.get("val")
    return node.op != "placeholder" and isinstance(value, Tensor) and value.is_floating_point()


def _writes_outside(node: fx.Node) -> bool:
    """Whether a node of a region writes into a tensor that the region has not made."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return False
    written: Any = node.args[0]
    while written.op == "call_function" and may_share_memory(written):
        written = written.args[0]
    return written.op == "placeholder"
