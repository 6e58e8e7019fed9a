"""Attention that a model writes out, as products, a mask and a softmax, is taken for one operator.

Models of Hugging Face do so with ``attn_implementation="eager"``, and much code by hand:
``softmax(q @ k.mT * scale + mask) @ v``, with dropout of the weights or without.  As one operator
it needs no matrix of scores, and the analysis of padding knows which rows it reads.

Recognised over rank 4, or with batch and heads as one axis: one mask that is added, of 0 and
``-inf`` or the least number, or one that fills with ``-inf``; before it biases, of trained tables
by position or of distances (ALiBi); weights that nothing else reads.  What hides by -1e9, or fills
with numbers, stays as it is written: there the gradients of rows that see nothing are others.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
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
_PRODUCTS = (_ATEN.matmul.default, _ATEN.bmm.default)
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default, _ATEN.flatten.using_ints)
_MOVED = (
    *(_ATEN.view, _ATEN.reshape, _ATEN.permute, _ATEN.transpose, _ATEN.unsqueeze, _ATEN.squeeze),
    *(_ATEN.expand, _ATEN.expand_as, _ATEN.slice, _ATEN.select, _ATEN.repeat, _ATEN.to),
    *(_ATEN._to_copy, _ATEN.contiguous, _ATEN.clone, _ATEN.alias, _ATEN.detach),
    *(_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.add, _ATEN.add_, _ATEN.sub),
    *(_ATEN.mul, _ATEN.neg, _ATEN.arange, _ATEN.pow, _ATEN.full),
)
"""Operators by which a bias by position is made: none makes a number that hides."""


@dataclass(frozen=True, slots=True)
class _Term:
    """What is added to scores, in the end by a factor."""

    node: fx.Node
    factor: float
    is_merged: bool  # batch and heads are one axis


@dataclass(slots=True)
class _Written:
    """One attention as the graph has it; nodes of it."""

    end: fx.Node  # the product of weights and values
    parameters: Container[str]
    inner: list[fx.Node] = field(default_factory=list)  # what nothing else reads, last first
    q: Any = None
    k: Any = None
    v: Any = None
    scale: float = 1.0
    added: list[_Term] = field(default_factory=list)  # to scores, masks last
    is_masked: bool = False
    filled: fx.Node | None = None  # where scores become -inf
    dropout: float = 0.0
    heads: list[list[str]] = field(default_factory=list)  # of scores that a mask or bias reads


def attention_as_one(graph: fx.GraphModule, parameters: Container[str]) -> fx.GraphModule:
    """Return a graph with one operator for each attention that is written out.

    ``parameters``: names of the placeholders that are parameters of the model.
    """
    read = (_read(node, parameters) for node in graph.graph.nodes)
    found = [written for written in read if written is not None]
    if not found:
        return graph
    copy, values = fx.Graph(), {}
    result = copy.graph_copy(graph.graph, values)
    output = copy.output(result)
    output.meta = dict(graph.graph.output_node().meta)
    masks: dict[Any, fx.Node] = {}  # layers have the same
    changes = any(_changes(node) for node in copy.nodes)
    for written in found:
        _replace(copy, values, {} if changes else masks, written)
    return fx.GraphModule(graph, copy)


def _replace(
    graph: fx.Graph, values: dict[fx.Node, Any], masks: dict[Any, fx.Node], written: _Written
) -> None:
    end = values[written.end]

    def emit(target: Any, *args: Any, **named: Any) -> fx.Node:
        node = graph.call_function(target, args, named)
        node.meta = {k: v for k, v in end.meta.items() if k != "val"}
        return node

    def mask_of() -> fx.Node | None:
        mask = None
        for each in written.added:
            term = values[each.node]
            if each.is_merged:
                term = emit(_ATEN.unflatten.int, term, 0, [-1, _value(written.q).shape[1]])
            term = term if each.factor == 1 else emit(_ATEN.mul.Tensor, term, each.factor)
            mask = term if mask is None else emit(_ATEN.add.Tensor, mask, term)
        if written.filled is None:
            return mask
        filled = values[written.filled]
        if mask is None:
            return emit(_ATEN.logical_not.default, filled)
        return emit(_ATEN.where.ScalarSelf, filled, -math.inf, mask)

    with graph.inserting_before(end):
        rank, key = _value(written.end).dim(), (*written.added, written.filled)
        mask = masks.get(key) or mask_of()
        if mask is not None:
            masks[key] = mask
        operands = [values[node] for node in (written.q, written.k, written.v)]
        whole = emit(
            _ATEN.scaled_dot_product_attention.default,
            *(*operands, mask, written.dropout, False),
            scale=written.scale,
        )
        whole.meta = dict(end.meta)
        if rank == 3:
            for user in list(end.users):
                is_back = user.target in _VIEWS and _value(user).dim() == 4
                if is_back and _shape(user)[1:] == _shape_of_heads(written):
                    user.replace_all_uses_with(whole)
                    graph.erase_node(user)
            whole = emit(_ATEN.flatten.using_ints, whole, 0, 1)
    end.replace_all_uses_with(whole)
    for node in [end, *(values[inner] for inner in written.inner)]:
        for user in list(node.users):
            if user.target is _CHECK:
                graph.erase_node(user)
        graph.erase_node(node)


def _read(end: fx.Node, parameters: Container[str]) -> _Written | None:
    """Read an attention that ends at a node; None: none does."""
    if end.target not in _PRODUCTS:
        return None
    written = _Written(end, parameters)
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
        if node.target in (*_PRODUCTS, _ATEN.baddbmm.default):
            *bias, written.q, swapped = node.args
            written.k = _unswapped(swapped)
            known = all(_adds(written, term, node, node.kwargs.get("beta", 1)) for term in bias)
            alpha: Any = node.kwargs.get("alpha", 1)
            written.scale *= alpha
            return written if known and _fits(written) else None
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


def _changes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _users(node: fx.Node) -> int:
    return sum(user.target is not _CHECK for user in node.users)


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def _is_identity(node: fx.Node) -> bool:
    one, other = _value(node), _value(node.args[0])
    is_moved = node.target in (_ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN._to_copy.default)
    is_clone = node.target in (_ATEN.contiguous.default, _ATEN.clone.default)
    # Batch and heads become one axis, or two.
    is_view = node.target in _VIEWS and _shape(node)[-2:] == _shape(node.args[0])[-2:]
    return (is_moved and one.dtype == other.dtype) or is_clone or is_view


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
    match node.target, rest:
        case _ATEN.mul.Tensor | _ATEN.mul_.Tensor, [int() | float() as factor]:
            written.scale *= factor
            return True
        case _ATEN.div.Tensor | _ATEN.div_.Tensor, [int() | float() as divisor]:
            written.scale /= divisor
            return True
        case _ATEN.add.Tensor | _ATEN.add_.Tensor, [fx.Node() as term] if not node.kwargs:
            return _adds(written, term, scores)
        case _ATEN.masked_fill.Scalar, [fx.Node() as condition, number]:
            is_first = not written.added and not written.is_masked and _value(scores).dim() == 4
            written.filled, written.is_masked = condition, True
            written.heads.append(_shape(scores)[:2])
            return number == -math.inf and written.scale == 1 and is_first
    return False


def _adds(written: _Written, term: Any, scores: fx.Node, factor: Any = 1) -> bool:
    """Note what is added to scores; False: it is no bias, and no mask."""
    ranks = _value(term).dim(), _value(scores).dim()
    is_merged = ranks == (3, 3) and _shape(term)[0] == _shape(scores)[0]
    written.added.append(_Term(term, written.scale * factor, is_merged))
    fits = is_merged or ranks[1] == 4 or ranks[0] < 3
    if ranks[1] == 4:
        written.heads.append(_shape(scores)[:2])
    is_like = _value(term).dtype == _value(scores).dtype and ranks[0] <= 4
    return fits and is_like and (_is_bias(term, written.parameters) or _hides(term, written))


def _hides(mask: fx.Node, written: _Written) -> bool:
    """Note a mask that is added last: numbers that hide, and others that do not."""
    is_first, numbers = not written.is_masked, _numbers(mask)
    if numbers is None and mask.target is _ATEN.add.Tensor and not mask.kwargs:
        for one, other in (mask.args, reversed(mask.args)):  # a bias and a mask in one
            if _is_bias(one, written.parameters):
                numbers = _numbers(other)
    written.is_masked = True
    is_clear = numbers is not None and not any(_HIDES < each < _LEAST for each in numbers)
    return is_clear and is_first and written.scale == 1


def _is_bias(node: Any, parameters: Container[str]) -> bool:
    """Whether a tensor is made of parameters, small numbers and whole numbers alone."""
    waiting, seen = [node], set[Any]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, int | float) and not abs(each) < -_LEAST:
            return False
        if not isinstance(each, fx.Node) or each in seen:
            continue
        seen.add(each)
        value = _value(each)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue  # whole numbers are indices, or counts
        if each.op == "placeholder":
            if each.name not in parameters:
                return False
        elif getattr(each.target, "overloadpacket", None) in _MOVED:
            waiting += [*_operands(each)]
        else:
            return False
    return isinstance(node, fx.Node)


def _operands(node: fx.Node) -> Iterator[Any]:
    """Yield the tensors that a node reads, and the numbers among them."""
    schema: Any = node.target
    for argument, value in zip(schema._schema.arguments, node.args, strict=False):
        if argument.type.kind() == "NumberType" or isinstance(value, fx.Node):
            yield value


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


def _shape_of_heads(written: _Written) -> list[str]:
    """Return the extents of the result but that of the batch."""
    return [*_shape(written.q)[1:3], _shape(written.v)[3]]


def _shape(node: Any) -> list[str]:
    value = _value(node)
    return [str(n) for n in value.shape] if isinstance(value, Tensor) else []


def _unswapped(node: Any) -> Any:
    """Return the keys that are transposed for the product; None: it is something else."""
    if not isinstance(node, fx.Node) or node.target not in _SWAPS:
        return None
    arguments: Any = node.args
    x, *axes = arguments
    rank = _value(x).dim()
    if node.target is _ATEN.permute.default:
        (axes,) = axes
        wanted = [*range(rank - 2), rank - 1, rank - 2]
        return x if [axis % rank for axis in axes] == wanted else None
    is_last_two = node.target is _ATEN.mT.default or {axis % rank for axis in axes} == {
        rank - 2,
        rank - 1,
    }
    return x if is_last_two else None


def _by_heads(node: Any) -> Any:
    """Follow views that only make batch and heads one axis, to rank 4."""
    while isinstance(node, fx.Node) and _value(node).dim() == 3 and node.target in _VIEWS:
        if _shape(node)[-2:] != _shape(node.args[0])[-2:]:
            break
        node = node.args[0]
    return node


def _fits(written: _Written) -> bool:
    written.q, written.k, written.v = map(_by_heads, (written.q, written.k, written.v))
    values = [_value(node) for node in (written.q, written.k, written.v)]
    if any(not isinstance(value, Tensor) or value.dim() != 4 for value in values):
        return False
    is_wide = written.filled is not None and _value(written.filled).dim() > 4
    q, k, v = values
    heads = [[str(n) for n in x.shape[:2]] for x in values]
    widths = [x.shape[3] for x in values]
    return (
        not is_wide
        and q.dtype == k.dtype == v.dtype
        and q.dtype in _DTYPES
        and heads[0] == heads[1] == heads[2]
        and all(each == heads[0] for each in written.heads)
        and isinstance(q.shape[1], int)
        and str(k.shape[2]) == str(v.shape[2])
        and all(isinstance(width, int) and 0 < width <= MOST_DIM for width in widths)
    )
