"""Attention that a model writes out, as products, a mask and a softmax, is taken for one operator.

Models of Hugging Face do so with ``attn_implementation="eager"``, and much code by hand:
``softmax(q @ k.mT * scale + mask) @ v``, with dropout of the weights or without.  As one operator
it needs no matrix of scores, and the analysis of padding knows which rows it reads.

Recognised over rank 4: one mask that is added, of 0 and ``-inf`` or the least number, or one that
fills with ``-inf``; weights that nothing else reads.  What hides by -1e9, or fills with numbers,
stays as it is written: there the gradients of rows that see nothing are others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from relax_disc.ops.attention.library import MOST_DIM

_ATEN = torch.ops.aten
_HIDES = -1e30
_LEAST = -100.0  # of numbers that leave the log of a sum its digits
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CHECK = _ATEN._assert_tensor_metadata.default
_ZEROS = (_ATEN.zeros.default, _ATEN.zeros_like.default, _ATEN.new_zeros.default)
_SAME = (
    *(_ATEN.slice.Tensor, _ATEN.expand.default, _ATEN.unsqueeze.default, _ATEN.view.default),
    *(_ATEN.to.dtype, _ATEN.alias.default, _ATEN.clone.default, _ATEN.contiguous.default),
)
_SWAPS = (_ATEN.transpose.int, _ATEN.permute.default, _ATEN.mT.default)


@dataclass(slots=True)
class _Written:
    """One attention as the graph has it; nodes of it."""

    end: fx.Node  # the product of weights and values
    inner: list[fx.Node]  # what nothing else reads, last first
    q: Any = None
    k: Any = None
    v: Any = None
    scale: float = 1.0
    added: fx.Node | None = None
    filled: fx.Node | None = None  # where scores become -inf
    dropout: float = 0.0


def attention_as_one(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with one operator for each attention that is written out."""
    found = [written for node in graph.graph.nodes if (written := _read(node)) is not None]
    if not found:
        return graph
    copy, values = fx.Graph(), {}
    result = copy.graph_copy(graph.graph, values)
    output = copy.output(result)
    output.meta = dict(graph.graph.output_node().meta)
    for written in found:
        _replace(copy, values, written)
    return fx.GraphModule(graph, copy)


def _replace(graph: fx.Graph, values: dict[fx.Node, Any], written: _Written) -> None:
    end = values[written.end]

    def emit(target: Any, *args: Any, **named: Any) -> fx.Node:
        node = graph.call_function(target, args, named)
        node.meta = {k: v for k, v in end.meta.items() if k != "val"}
        return node

    with graph.inserting_before(end):
        mask = None if written.added is None else values[written.added]
        if written.filled is not None:
            mask = emit(_ATEN.logical_not.default, values[written.filled])
        operands = [values[node] for node in (written.q, written.k, written.v)]
        whole = emit(
            _ATEN.scaled_dot_product_attention.default,
            *(*operands, mask, written.dropout, False),
            scale=written.scale,
        )
        whole.meta = dict(end.meta)
    end.replace_all_uses_with(whole)
    for node in [end, *(values[inner] for inner in written.inner)]:
        for user in list(node.users):
            if user.target is _CHECK:
                graph.erase_node(user)
        graph.erase_node(node)


def _read(end: fx.Node) -> _Written | None:
    """Read an attention that ends at a node; None: none does."""
    if end.target is not _ATEN.matmul.default:
        return None
    written = _Written(end, [])
    weights, written.v = end.args
    steps = _chain(weights, written)
    node = next(steps, None)
    if node is not None and node.target is _ATEN.dropout.default:
        _, p, is_training = node.args
        written.dropout = float(p) if is_training else 0.0  # pyright: ignore[reportArgumentType]
        node = next(steps, None)
    if node is None or written.dropout >= 1 or not _is_softmax(node):
        return None
    for node in steps:
        if node.target is _ATEN.matmul.default:
            written.q, swapped = node.args
            written.k = _unswapped(swapped)
            return written if _fits(written) else None
        if not _note(node, written):
            return None
    return None


def _chain(node: Any, written: _Written) -> Iterator[fx.Node]:
    """Go back over nodes that only the attention reads, past conversions to their own type."""
    while isinstance(node, fx.Node) and _users(node) == 1 and node.op == "call_function":
        written.inner.append(node)
        if not _is_identity(node):
            yield node
        node = node.args[0]


def _users(node: fx.Node) -> int:
    return sum(user.target is not _CHECK for user in node.users)


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def _is_identity(node: fx.Node) -> bool:
    one, other = _value(node), _value(node.args[0])
    is_moved = node.target in (_ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN._to_copy.default)
    is_clone = node.target in (_ATEN.contiguous.default, _ATEN.clone.default)
    return (is_moved and one.dtype == other.dtype) or is_clone


def _is_softmax(node: fx.Node) -> bool:
    if node.target is not _ATEN.softmax.int:
        return False
    x, axis, *_ = node.args
    return axis in (-1, _value(x).dim() - 1) and _value(node).dtype == _value(x).dtype


def _note(node: fx.Node, written: _Written) -> bool:
    """Note what is done with scores before the softmax; False: something else."""
    arguments: Any = node.args
    scores, *rest = arguments
    if _shape(node) != _shape(scores):
        return False
    is_masked = written.added is not None or written.filled is not None
    match node.target, rest:
        case _ATEN.mul.Tensor, [int() | float() as factor]:
            written.scale *= factor
            return True
        case _ATEN.div.Tensor, [int() | float() as divisor]:
            written.scale /= divisor
            return True
        case _ATEN.add.Tensor, [fx.Node() as mask] if not node.kwargs:
            is_like = _value(mask).dtype == _value(scores).dtype and _value(mask).dim() <= 4
            written.added, numbers = mask, _numbers(mask)
            if numbers is None or any(_HIDES < number < _LEAST for number in numbers):
                return False
            return is_like and written.scale == 1 and not is_masked
        case _ATEN.masked_fill.Scalar, [fx.Node() as condition, number]:
            written.filled = condition
            return number == -math.inf and written.scale == 1 and not is_masked
    return False


def _numbers(node: Any) -> set[float] | None:
    """List the numbers that a mask is made of; None: not known."""
    if isinstance(node, int | float):
        return {float(node)}
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    arguments: Any = node.args
    if node.target in _SAME:
        return _numbers(arguments[0])
    if node.target in _ZEROS:
        return {0.0}
    if node.target in (_ATEN.triu.default, _ATEN.tril.default):
        parts = [arguments[0], 0.0]
    elif node.target in (_ATEN.full.default, _ATEN.full_like.default, _ATEN.new_full.default):
        parts = [arguments[-1]]
    elif node.target is _ATEN.masked_fill.Scalar:
        parts = [arguments[0], arguments[2]]
    elif getattr(node.target, "overloadpacket", None) is _ATEN.where:
        parts = arguments[1:]
    else:
        return None
    found = [_numbers(part) for part in parts]
    return None if None in found else {number for each in found for number in each or ()}


def _shape(node: Any) -> list[str]:
    value = _value(node)
    return [str(n) for n in value.shape] if isinstance(value, Tensor) else []


def _unswapped(node: Any) -> Any:
    """Return the keys that are transposed for the product; None: it is something else."""
    if not isinstance(node, fx.Node) or node.target not in _SWAPS:
        return None
    arguments: Any = node.args
    x, *axes = arguments
    if node.target is _ATEN.permute.default:
        (axes,) = axes
        return x if axes in ([0, 1, 3, 2], [0, 1, -1, -2]) else None
    is_last_two = node.target is _ATEN.mT.default or {axis % 4 for axis in axes} == {2, 3}
    return x if is_last_two else None


def _fits(written: _Written) -> bool:
    values = [_value(node) for node in (written.q, written.k, written.v)]
    if any(not isinstance(value, Tensor) or value.dim() != 4 for value in values):
        return False
    mask = written.added or written.filled
    is_wide = mask is not None and _value(mask).dim() > 4
    q, k, v = values
    heads = [[str(n) for n in x.shape[:2]] for x in values]
    widths = [x.shape[3] for x in values]
    return (
        not is_wide
        and q.dtype == k.dtype == v.dtype
        and q.dtype in _DTYPES
        and heads[0] == heads[1] == heads[2]
        and str(k.shape[2]) == str(v.shape[2])
        and all(isinstance(width, int) and 0 < width <= MOST_DIM for width in widths)
    )
