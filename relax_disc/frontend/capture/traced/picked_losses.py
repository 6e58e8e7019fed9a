"""The cross-entropy of rows that a mask picks is that of all rows, of which the others are ignored.

``cross_entropy(logits[mask], labels[mask])`` is often written for ``ignore_index``.  Its rows have
a size that only the data tell; written with labels that are ignored, the loss has the sizes of the
batch, the vocabulary head takes the rows that count a few at a time, and the analysis of padding
reads which these are.

Recognised: logits and labels picked by one mask, a sum or a mean.  What is done with picked rows,
each by itself, is done with all instead: conversions, products with weights, norms and activations,
as in ``cross_entropy(head(states[mask]), labels[mask])``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_ATEN = torch.ops.aten
_LOSS = _ATEN.cross_entropy_loss.default
_CONVERTED = (_ATEN.to.dtype, _ATEN._to_copy.default, _ATEN.contiguous.default)
_RESHAPED = (_ATEN.view.default, _ATEN.reshape.default)
_ROW_BY_ROW = frozenset(
    {
        *(_ATEN.linear.default, _ATEN.layer_norm.default, _ATEN.rms_norm.default),
        *(_ATEN.gelu.default, _ATEN.relu.default, _ATEN.silu.default, _ATEN.tanh.default),
        *(_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor),
    }
)
_DEFAULTS = (None, 1, -100, 0.0)  # weight, reduction, ignored label, smoothing


def with_ignored_labels(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph whose losses of picked rows ignore the others instead."""
    if not any(_parts(node) for node in graph.graph.nodes):
        return graph
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {})).meta = dict(graph.graph.output_node().meta)
    for node in list(copy.nodes):
        parts = _parts(node)
        if parts is not None:
            _replace(copy, node, *parts)
    return fx.GraphModule(graph, copy)


def _parts(loss: fx.Node) -> tuple[fx.Node, list[fx.Node], fx.Node, fx.Node, list[Any]] | None:
    """Return logits, what is done with those picked, labels, mask, and the loss's options."""
    if loss.target is not _LOSS or loss.kwargs:
        return None
    logits, labels, *options = loss.args
    options = [*options, *_DEFAULTS[len(options) :]]
    if options[1] not in (1, 2) or not isinstance(options[2], int):
        return None
    from_logits, from_labels = _picked(logits), _picked(labels)
    if from_logits is None or from_labels is None:
        return None
    (rows, mask, steps), (wanted, other, others) = from_logits, from_labels
    rank = _value(mask).dim()
    is_plain = _value(rows).dim() == rank + 1 and _value(wanted).dim() == rank and not others
    return (rows, steps, wanted, mask, options) if mask is other and is_plain else None


def _picked(node: Any) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """Return what a mask picks rows of, the mask, and what is done with the rows, in order."""
    steps: list[fx.Node] = []
    while isinstance(node, fx.Node) and (_is_by_row(node) or node.target in _RESHAPED):
        if node.target not in _RESHAPED:
            steps.insert(0, node)
        elif [*map(str, _value(node).shape)] != [*map(str, _value(node.args[0]).shape)]:
            return None
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not _ATEN.index.Tensor:
        return None
    source, indices = node.args
    assert isinstance(indices, Sequence)
    is_mask = len(indices) == 1 and _value(indices[0]).dtype == torch.bool
    fits = is_mask and isinstance(source, fx.Node) and _value(indices[0]).dim() > 0
    return (source, indices[0], steps) if fits else None  # pyright: ignore[reportReturnType]


def _is_by_row(node: fx.Node) -> bool:
    """Whether a node does the same with each row of its first operand, and keeps their number."""
    if node.target in _CONVERTED:
        return True
    if node.target not in _ROW_BY_ROW or not isinstance(node.args[0], fx.Node):
        return False
    if _value(node.args[0]).dim() != 2 or _value(node).dim() != 2:
        return False
    if node.target in (_ATEN.layer_norm.default, _ATEN.rms_norm.default):
        shape: Any = node.args[1]
        return len(shape) == 1
    if node.target is _ATEN.linear.default:
        return True
    rest = [each for each in node.args[1:] if isinstance(each, fx.Node)]
    width = [str(_value(node.args[0]).shape[1])]
    return all(
        isinstance(each.meta.get("val"), Tensor) and [*map(str, _value(each).shape)] in ([], width)
        for each in rest
    )


def _value(node: Any) -> Tensor:
    return node.meta["val"]


def _replace(
    graph: fx.Graph,
    loss: fx.Node,
    rows: fx.Node,
    steps: Sequence[fx.Node],
    labels: fx.Node,
    mask: fx.Node,
    options: Sequence[Any],
) -> None:
    last = _value(mask).dim() - 1

    def emit(target: Any, *args: Any, **named: Any) -> fx.Node:
        node = graph.call_function(target, args, named)
        node.meta = {k: v for k, v in loss.meta.items() if k != "val"}
        return node

    with graph.inserting_before(loss):
        # Of a slice, a view would ask for its strides.
        all_rows = emit(_ATEN.clone.default, rows, memory_format=torch.contiguous_format)
        all_rows = emit(_ATEN.flatten.using_ints, all_rows, 0, last)
        for step in steps:
            all_rows = emit(step.target, all_rows, *step.args[1:], **step.kwargs)
        wanted = emit(_ATEN.where.ScalarOther, mask, labels, options[2])
        wanted = emit(_ATEN.flatten.using_ints, wanted, 0, last)
        whole = emit(_LOSS, all_rows, wanted, *options)
    whole.meta = dict(loss.meta)
    before = [node for node in (loss.args[0], loss.args[1]) if isinstance(node, fx.Node)]
    loss.replace_all_uses_with(whole)
    graph.erase_node(loss)
    for node in before:
        _erase(graph, node)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase what picks rows for a loss alone, and what was asked about how many there are."""
    for user in list(node.users):
        if _asks_size(user):
            _erase_all(graph, user)
    is_ours = node.target in (*_CONVERTED, *_RESHAPED, *_ROW_BY_ROW, _ATEN.index.Tensor)
    if not node.users and is_ours:
        (source, *_) = node.args
        graph.erase_node(node)
        if isinstance(source, fx.Node):
            _erase(graph, source)


def _asks_size(node: fx.Node) -> bool:
    """Whether a node and all that follow from it are questions about a size, checks at last."""
    if not node.users:
        return "assert" in str(node.target) or "constrain_range" in str(node.target)
    return not isinstance(node.meta.get("val"), Tensor) and all(map(_asks_size, node.users))


def _erase_all(graph: fx.Graph, node: fx.Node) -> None:
    for user in list(node.users):
        _erase_all(graph, user)
    graph.erase_node(node)
