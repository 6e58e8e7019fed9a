"""Axes that ``squeeze`` removes where their size happens to be 1, which a program cannot follow.

``scores.squeeze()`` of a batch of one row has an axis less in eager PyTorch.  A program keeps the
axes that the example has, so calls with such a size are refused, unless nobody can tell: a first
axis of size 1 that is missing changes no value of elementwise operators, of what is written into a
tensor, of sums and means over all.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.source_lines import SourceLine, calling_line, source_line

_ATEN = torch.ops.aten
_SQUEEZES = (
    _ATEN.squeeze.default,
    _ATEN.squeeze.dim,
    _ATEN.squeeze.dims,
    _ATEN.squeeze_.default,
    _ATEN.squeeze_.dim,
    _ATEN.squeeze_.dims,
)
_CALLS = (torch.squeeze, Tensor.squeeze, Tensor.squeeze_)
_QUESTIONS = (
    Tensor.dim,
    Tensor.size,
    Tensor.ndim.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.shape.__get__,  # pyright: ignore[reportAttributeAccessIssue]
)
_OVER_ALL = (_ATEN.sum.default, _ATEN.mean.default)
_OF_LAST_AXES = (
    _ATEN.to.dtype,
    _ATEN.detach.default,
    _ATEN.clone.default,
    _ATEN.contiguous.default,
    _ATEN.broadcast_tensors.default,
    operator.getitem,
    _ATEN.linear.default,
    _ATEN.layer_norm.default,
    _ATEN._assert_tensor_metadata.default,
)
_BY_AXIS = (
    _ATEN.sum.dim_IntList,
    _ATEN.mean.dim,
    _ATEN.softmax.int,
    _ATEN.log_softmax.int,
)
_LOSSES = (
    _ATEN.mse_loss.default,
    _ATEN.l1_loss.default,
    _ATEN.smooth_l1_loss.default,
    _ATEN.huber_loss.default,
    _ATEN.binary_cross_entropy.default,
    _ATEN.binary_cross_entropy_with_logits.default,
    _ATEN.soft_margin_loss.default,
    _ATEN.poisson_nll_loss.default,
    _ATEN.margin_ranking_loss.default,
    _ATEN.hinge_embedding_loss.default,
)
_NO_REDUCTION = 0


class Squeezes:
    """The squeezes of an export whose result, or what was computed from it, was asked for its axes.

    The answer is Python's, of which the exported program knows nothing.
    """

    def __init__(self) -> None:
        self._results: dict[int, tuple[Tensor, SourceLine]] = {}
        self._asked: set[SourceLine] = set()

    def note(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note a call of the user's."""
        if func in _CALLS:
            self._results[id(result)] = result, calling_line()
        elif self._results:
            found = [self._results.get(id(x)) for x in pytree.tree_leaves(args)]
            for _, line in filter(None, found):
                if func in _QUESTIONS:
                    self._asked.add(line)
                for x in pytree.tree_leaves(result):
                    if isinstance(x, Tensor):
                        self._results[id(x)] = x, line

    def sizes(self, module: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
        """Find the nodes that remove axes of dynamic sizes if they are 1, and those sizes.

        Left out are those of which no value tells.
        """
        for part in module.modules():
            if not isinstance(part, fx.GraphModule):
                continue
            for node in part.graph.nodes:
                if node.target not in _SQUEEZES:
                    continue
                shape = node.args[0].meta["val"].shape
                if not shape:  # a number has no axis, though PyTorch squeezes its axis 0
                    continue
                axes = {axis % len(shape) for axis in _axes(node, len(shape))}
                dynamic = {axis for axis in axes if isinstance(shape[axis], torch.SymInt)}
                asked = source_line(node) in self._asked
                if dynamic and (asked or dynamic != {0} or not _is_unseen(node)):
                    yield from ((node, shape[axis].node.expr) for axis in sorted(dynamic))


def _axes(node: fx.Node, rank: int) -> Any:
    if node.target is _ATEN.squeeze.default:
        return range(rank)
    axes: Any = node.args[1]
    return axes if isinstance(axes, list | tuple) else [axes]


def _is_unseen(node: fx.Node) -> bool:
    """Whether no value depends on a first axis of size 1 being there."""
    waiting, seen = [node], {node}
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user in seen or _ends_in_a_number(user) or _is_written(value, user):
                continue
            if not _computes_alike(user):
                return False
            seen.add(user)
            waiting.append(user)
    return True


def _ends_in_a_number(node: fx.Node) -> bool:
    target: Any = node.target
    is_mean = target in _LOSSES and _argument(node, "reduction", 1) != _NO_REDUCTION
    return is_mean or target in _OVER_ALL or isinstance(node.meta.get("val"), torch.SymInt)


def _is_written(value: fx.Node, node: fx.Node) -> bool:
    """Whether an operator writes a value into another tensor, to whose axes it is broadcast."""
    return node.target is _ATEN.copy_.default and node.args[0] is not value


def _computes_alike(node: fx.Node) -> bool:
    """Whether an operator counts no axes from the first one on."""
    target: Any = node.target
    if target in _BY_AXIS:
        axes = _argument(node, "dim", None)
        return all(axis < 0 for axis in (axes if isinstance(axes, list | tuple) else [axes or 0]))
    if target in _OF_LAST_AXES:
        return True
    is_elementwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return (is_elementwise or target in _LOSSES) and not target._schema.is_mutable


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get(name, default)
