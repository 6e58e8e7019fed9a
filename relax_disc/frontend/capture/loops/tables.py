"""Tables that a loop fills row by row, of which a step reads rows that the steps before wrote.

``a[:, t] = f(a[:, t - 1])``, as dynamic programs have it, becomes a state that the loop carries:
what a step writes is what the next one reads.  Before the first step the rows are the table's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from relax_disc.frontend.capture.loops.nodes import add_call, add_size, may_share_memory
from relax_disc.frontend.capture.loops.steps import are_alike
from relax_disc.frontend.capture.traced.writes import writes

_ATEN = torch.ops.aten
_CARRY = torch.ops.relax_disc.loop_carry.default
_MOST_STEPS = 4  # that a row may lie back

Place = Callable[[fx.Node], Any]
"""Gives the place of a ``select`` in a step: its axis, and a factor and an offset of the step."""


def carry_rows(index: fx.Node, end: fx.Node, inside: Sequence[fx.Node], place: Place) -> bool:
    """Carry what steps read of the rows that the steps before have written.

    ``inside``: the nodes of the step, in order. Returned: whether there is such a row.
    """
    written = [n for n in inside if n.target is _ATEN.copy_.default and _is_row(n.args[0], inside)]
    tables: list[Any] = [n.args[0].args[0] for n in written]  # pyright: ignore
    found = False
    for write, table in zip(written, tables, strict=True):
        if tables.count(table) == 1:
            found |= _carry(index, end, inside, place, write)
    return found


def _is_row(node: Any, inside: Sequence[fx.Node]) -> bool:
    return node.target is _ATEN.select.int and node.args[0] not in inside


def _carry(
    index: fx.Node, end: fx.Node, inside: Sequence[fx.Node], place: Place, write: fx.Node
) -> bool:
    row: Any
    value: Any
    row, value = write.args[:2]
    table, here = row.args[0], place(row)
    reads: dict[int, list[fx.Node]] = {}
    for node in inside:
        if node is row or not _is_row(node, inside) or node.args[0] is not table:
            continue
        there = place(node)
        back = (here.offset - there.offset) / here.factor
        if there.axis != here.axis or there.factor != here.factor or not back.is_Integer:
            return False
        if not 1 <= back <= _MOST_STEPS or _is_written(node, inside):
            return False
        reads.setdefault(int(back), []).append(node)
    if (
        not reads
        or not _stays(value, write, inside)
        or not are_alike(value.meta.get("val"), row.meta["val"])
    ):
        return False
    carries: list[fx.Node] = []
    mode = row.meta["val"].fake_mode
    for back in range(1, max(reads) + 1):
        with index.graph.inserting_before(index):
            at = _position(index, here.offset - back * here.factor, mode)
            if at is None:
                return False
            first = add_call(index.graph, mode, _ATEN.select.int, table, here.axis, at)
            first = add_call(index.graph, mode, _ATEN.clone.default, first)
        with index.graph.inserting_after(index):
            carries.append(add_call(index.graph, mode, _CARRY, index, first))
    for back, nodes in reads.items():
        for node in nodes:
            node.replace_all_uses_with(carries[back - 1])
            index.graph.erase_node(node)
    _end_with(end, carries, [value, *carries[:-1]])
    return True


def _end_with(end: fx.Node, olds: list[fx.Node], news: list[fx.Node]) -> None:
    """Add states to those that a step returns, which come before what else it does."""
    before: Any
    now: Any
    where, before, now, *rest = end.args
    for user in list(end.users):
        place: Any = user.args[1]
        if place >= len(now):
            user.args = end, place + len(news)
    values = [*end.meta["val"]]
    values[len(now) : len(now)] = [node.meta["val"] for node in news]
    end.args = (where, [*before, *olds], [*now, *news], *rest)
    end.meta["val"] = values


def _position(index: fx.Node, position: Any, mode: Any) -> Any:
    """Write a row's place where the loop begins: a number, or a node."""
    if sympy.sympify(position).is_Integer:
        return int(position)
    size = mode.shape_env.create_symintnode(position, hint=None)
    return add_size(index, size)


def _is_written(node: fx.Node, inside: Sequence[fx.Node]) -> bool:
    """Whether a step writes in place into what it reads."""
    return any(writes(other) and _root(other.args[0], inside) is node for other in inside)


def _stays(value: fx.Node, write: fx.Node, inside: Sequence[fx.Node]) -> bool:
    """Whether what is written into a table stays as it is to the end of the step."""
    later = inside[list(inside).index(write) + 1 :]
    root = _root(value, inside)
    return value in inside and not any(
        writes(n) and _root(n.args[0], inside) is root for n in later
    )


def _root(node: Any, inside: Sequence[fx.Node]) -> Any:
    while node in inside and may_share_memory(node):
        if node.target is _ATEN.select.int and node.args[0] not in inside:
            return node
        node = node.args[0]
    return node
