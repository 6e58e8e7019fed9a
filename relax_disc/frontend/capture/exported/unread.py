"""Sizes that depend on data of which nothing is left but what PyTorch checks of them.

A number that was taken out of a tensor is that tensor again where it is read; the number itself
would be refused.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from relax_disc.frontend.capture.traced.writes import graphs_in, writes


def erase_unread(module: fx.GraphModule, given: Collection[fx.Node] = ()) -> None:
    """Erase sizes that depend on data where only checks of them are left.

    ``given``: inputs of the graph, if it is one inside another, that depend on data.
    """
    graph = module.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    checks = ("aten._assert_scalar.", "aten.sym_constrain_range")
    of_data = {*given, *(node for node in nodes if node.meta.get("unbacked_bindings"))}
    for node in nodes:
        if of_data.intersection(node.all_input_nodes):
            of_data.add(node)
    for node in reversed(nodes):
        inner = next(graphs_in(node), None)
        if inner is not None:
            _erase_inside(node, inner, of_data)
        does_more = node.is_impure() or any(map(_does_more, graphs_in(node)))
        unread = not node.users and (not does_more or str(node.target).startswith(checks))
        if node in of_data and unread:
            graph.erase_node(node)
    if of_data:
        module.recompile()


def _erase_inside(node: fx.Node, inner: fx.GraphModule, of_data: Collection[fx.Node]) -> None:
    """Erase them in a graph that a node runs, and the operands that it does not read then."""
    first = len(node.args) - len(inputs := list(inner.graph.find_nodes(op="placeholder")))
    pairs = list(zip(inputs, node.args[first:], strict=True))
    erase_unread(inner, [own for own, outer in pairs if outer in of_data])
    dropped = [own for own, outer in pairs if not own.users and outer in of_data]
    if not dropped:
        return
    node.args = (*node.args[:first], *(outer for own, outer in pairs if own not in dropped))
    for own in dropped:
        inner.graph.erase_node(own)
    inner.recompile()


def _does_more(module: fx.GraphModule) -> bool:
    """Whether a graph does more than compute what it returns."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    return any(
        writes(node) or node.is_impure() or any(map(_does_more, graphs_in(node))) for node in calls
    )
