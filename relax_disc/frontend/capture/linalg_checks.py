"""Let the operators of linear algebra check for themselves what PyTorch checks after them.

``torch.linalg.inv`` computes an inverse and an error code, and a second operator without results
raises on the code.  In a graph that lists results nothing would keep the second; the first can do
both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx
from torch._library.simple_registry import singleton

_CHECK = torch.ops.aten._linalg_check_errors.default


@contextlib.contextmanager
def checks_are_traced() -> Iterator[None]:
    """Trace a check as an operator like others; functionalization would ask for a token."""
    holder = singleton.find(_CHECK._name).effect
    before = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(before)


def check_where_computed(graph: fx.GraphModule) -> None:
    """Ask the operators whose codes are checked to raise by themselves, and drop the checks."""
    for node in graph.graph.find_nodes(op="call_function", target=_CHECK):
        source = node.args[0]
        while isinstance(source, fx.Node) and not _has_flag(source):
            source = source.args[0]
        assert isinstance(source, fx.Node), "every error code is the result of an operator"
        source.kwargs = {**source.kwargs, "check_errors": True}
        graph.graph.erase_node(node)
    graph.recompile()


def _has_flag(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(a.name == "check_errors" for a in schema.arguments)
