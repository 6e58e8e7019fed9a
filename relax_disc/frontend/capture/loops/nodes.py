"""Nodes that are added to an exported graph, each with the value that PyTorch traces for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def add_call(graph: fx.Graph, mode: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call where the graph inserts; ``mode``: of the graph's fake tensors."""
    made = graph.call_function(target, args, kwargs)
    with mode:
        made.meta = {"val": target(*values_of(args), **values_of(kwargs))}
    return made


def values_of(arguments: Any) -> Any:
    """Put the values that PyTorch has traced in the places of nodes."""
    return pytree.tree_map_only(fx.Node, lambda node: node.meta["val"], arguments)


def may_share_memory(node: fx.Node) -> bool:
    """Whether an operator returns a view, or what it has written into."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)


class _Adding(GraphAppendingTracer):
    """Adds arithmetic of sizes to a graph."""

    def create_node(self, kind: Any, target: Any, args: Any, kwargs: Any, *rest: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest)
        node.meta["val"] = target(*values_of(args), **values_of(kwargs))
        return node


def add_size(before: fx.Node, size: Any) -> Any:
    """Compute a size where the graph inserts, of what is known before a node.

    Returned: an integer or a node; None where it is not known there.
    """
    if not isinstance(size, torch.SymInt) or size.node.expr.is_Integer:
        return int(size)
    known, wanted = _known_sizes(before), size.node.expr
    if wanted in known:
        return known[wanted]()
    if not wanted.free_symbols <= set(known):
        return None
    adding = _Adding(before.graph)
    sizes = {symbol: fx.Proxy(known[symbol](), adding) for symbol in wanted.free_symbols}
    return sympy_interp(PythonReferenceAnalysis, sizes, wanted).node


def _known_sizes(before: fx.Node) -> dict[Any, Callable[[], fx.Node]]:
    """Map expressions to what gives a node for each, of those that are known before a node."""
    found: dict[Any, Callable[[], fx.Node]] = {}
    for node in before.graph.nodes:
        if node is before:
            break
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        for axis, size in enumerate(sizes):
            if isinstance(size, torch.SymInt):
                found.setdefault(size.node.expr, _giving(node, axis))
    return found


def _giving(node: fx.Node, axis: int) -> Callable[[], fx.Node]:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return lambda: node
    sym_size = torch.ops.aten.sym_size.int
    return lambda: add_call(node.graph, value.fake_mode, sym_size, node, axis)  # pyright: ignore
