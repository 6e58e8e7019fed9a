"""What a recorded loop leaves in one memory, and the program goes on to write.

A step that appends ``h`` to a list and keeps it leaves one tensor by two names, as ``h = x[:, t]``
leaves a part of ``x``.  The operator of a loop makes a tensor of its own for each.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from relax_disc.frontend.capture.traced.writes import viewed, written_operands


def shared_and_written(end: fx.Node) -> fx.Node | None:
    """Find a write behind a loop that two of its results, or one and another tensor, would see.

    ``end``: the operator that ends the step in the exported graph.  Returned: an operator that
    writes into one of the two, the other of which is read later; None where there is none.
    """
    place = {node: k for k, node in enumerate(end.graph.nodes)}
    behind = [node for node, k in place.items() if k > place[end]]
    writers = [(node, operand) for node in behind for operand in written_operands(node)]
    if not writers:
        return None
    results: Any = end.args[2:5]
    sources = [_memory(value, end) for values in results for value in values]
    getters: Any = end.users
    # For each tensor the one whose memory it has in eager.
    group = {source: source for source in sources}
    group |= {getter: sources[getter.args[1]] for getter in getters}
    holders = {node: _memory(node, end) for node in place}
    for writer, operand in writers:
        written = holders[operand]
        if written not in group:
            continue
        same = {node for node, of in group.items() if of is group[written]} - {written}
        others = [node for node, of in holders.items() if of in same]
        is_read = any(place[user] > place[writer] for node in others for user in node.users)
        if is_read or any(node.op == "placeholder" for node in same):
            return writer
    return None


def _memory(node: fx.Node, end: fx.Node) -> fx.Node:
    """Follow views to a result of the loop, or to the node that holds their memory."""
    while not (node.target is operator.getitem and node.args[0] is end):
        below = viewed(node)
        if below is None:
            break
        node = below
    return node
