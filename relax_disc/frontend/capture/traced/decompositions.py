"""Which ATen operators are broken into smaller ones while tracing, and which are traced whole.

PyTorch's core decompositions, and a few more for gradients, less the operators that the importer
translates whole because a whole operator becomes a better kernel.

Rules of operators that are kept take the operator's own arguments and return its result built from
the torch operators of :mod:`relax_disc.ops`, or ``None``: "not mine", it is then decomposed.

``torch.linalg.inv`` computes an inverse and an error code, and a second operator without results
raises on the code.  In a graph that lists results nothing would keep the second; the first can do
both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._library.simple_registry import singleton
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl
from torch.nn import functional
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.traced.rewrites import REWRITES
from relax_disc.ops.registry import KEPT

_ATEN = torch.ops.aten

_ALSO_BROKEN = (
    _ATEN.addmm,
    _ATEN._fused_rms_norm,
    _ATEN._fused_rms_norm_backward,
    _ATEN._log_softmax_backward_data,
    _ATEN._softmax_backward_data,
    _ATEN._native_batch_norm_legit,
    _ATEN._native_batch_norm_legit_functional,
    _ATEN._native_batch_norm_legit_no_training,
    _ATEN.gelu,
    _ATEN.gelu_backward,
    _ATEN.hardtanh,
    _ATEN.index_add,
    _ATEN.leaky_relu,
    _ATEN.linalg_vector_norm,
    _ATEN.native_batch_norm,
    _ATEN.native_batch_norm_backward,
    _ATEN.native_group_norm,
    _ATEN.native_group_norm_backward,
    _ATEN.native_layer_norm,
    _ATEN.native_layer_norm_backward,
    _ATEN.nll_loss_backward,
    _ATEN.nll_loss_forward,
    _ATEN.sigmoid_backward,
    _ATEN.silu_backward,
    _ATEN.tanh_backward,
    _ATEN.threshold_backward,
)

_KEPT_WHOLE = (
    _ATEN.embedding_dense_backward.default,
    _ATEN.multi_margin_loss.default,
    _ATEN.multilabel_margin_loss_forward.default,
    _ATEN.select_backward.default,
    _ATEN.slice_backward.default,
    _ATEN.smooth_l1_loss_backward.default,
    _ATEN.unfold_backward.default,
    _ATEN.upsample_bilinear2d.default,
)


# What PyTorch does not know of them: the gradient is shaped as the operand at this position.
for _operator, _position in (
    (_ATEN.multi_margin_loss_backward.default, 1),
    (_ATEN.multilabel_margin_loss_backward.default, 1),
):

    def _like(mode: Any, operator: Any, *args: Any, like: int = _position, **kwargs: Any) -> Tensor:
        with mode:
            return torch.empty_like(args[like])

    if _operator not in op_implementations_dict:
        register_op_impl(_operator)(_like)


def _upsampled_from(
    mode: Any, operator: Any, grad: Tensor, size: Any, shape: Any, *_: Any
) -> Tensor:
    """Describe the gradient of a resized plane; PyTorch does so only if sizes are numbers."""
    with mode:
        return grad.new_empty(shape)


for _operator in (
    _ATEN.upsample_bilinear2d_backward.default,
    _ATEN._upsample_bicubic2d_aa_backward.default,
):
    if _operator not in op_implementations_dict:
        register_op_impl(_operator)(_upsampled_from)


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Suspend the forms in Python that PyTorch would take for these before any decomposition."""
    key = torch._C.DispatchKey.Autograd
    removed = [(o, o.py_kernels.pop(key)) for o in _KEPT_WHOLE if key in o.py_kernels]
    for operator, _ in removed:
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernel in removed:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


@functools.cache
def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by operator overload."""
    table = dict(core_aten_decompositions())
    table.update(get_decompositions(_ALSO_BROKEN))
    for operator in _KEPT_WHOLE:
        table.pop(operator, None)
    table[_ATEN.stack.default] = _stack
    table[_ATEN.smooth_l1_loss_backward.default] = _smooth_l1_gradient
    for dims in (1, 2, 3):
        operator = getattr(_ATEN, f"reflection_pad{dims}d_backward").default
        table[operator] = functools.partial(_reflected_back, table[operator])
    return table


def _reflected_back(
    general: Callable[..., Any], grad: Tensor, x: Tensor, padding: Sequence[Any]
) -> Tensor:
    """Fold back one axis after the other; PyTorch's form masks all once for each side and corner.

    ``general``: PyTorch's, for axes that are cut instead.
    """
    if any(not isinstance(amount, int) or amount < 0 for amount in padding):
        return general(grad, x, padding)
    for k, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        axis, others = x.dim() - 1 - k, (0, 0) * k
        size = x.shape[axis]
        made = grad.narrow(axis, before, size)
        if before:
            first = grad.narrow(axis, 0, before).flip(axis)
            made = made + functional.pad(first, (*others, 1, size - 1 - before))
        if after:
            last = grad.narrow(axis, before + size, after).flip(axis)
            made = made + functional.pad(last, (*others, size - 1 - after, 1))
        grad = made
    return grad


def _smooth_l1_gradient(grad: Tensor, x: Tensor, y: Tensor, reduction: int, beta: float) -> Tensor:
    """Choose by what PyTorch's kernel asks: its decomposition makes 1 of NaN."""
    difference = x - y
    slope = torch.where(difference >= beta, 1.0, difference / beta)
    slope = torch.where(difference <= -beta, -1.0, slope)
    return slope * (grad / x.numel() if reduction == 1 else grad)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join along an axis of its own; PyTorch's form makes one axis of that and the next."""
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


RULES: dict[Any, Callable[..., Any]] = {**KEPT, **REWRITES}
"""Of operators that are traced whole, by overload."""


def under_autocast(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Convert the operands as autocast would: its rules know ATen's operators, not ours.

    On the CPU it runs attention in its lower precision and cross-entropy in float32.
    """
    if not torch.is_autocast_enabled("cpu"):
        return args, kwargs
    chosen = {
        torch.ops.aten.scaled_dot_product_attention.default: torch.get_autocast_dtype("cpu"),
        torch.ops.aten.cross_entropy_loss.default: torch.float32,
    }
    if target not in chosen:
        return args, kwargs

    def convert(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(chosen[target]) if eligible else tensor

    return pytree.tree_map_only(Tensor, convert, (args, kwargs))


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
