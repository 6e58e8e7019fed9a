"""Which ATen operators are broken into smaller ones while tracing.

PyTorch's core decompositions, and a few more for gradients, less the operators that the importer
translates whole because a whole operator becomes a better kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl

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


if _ATEN.upsample_bilinear2d_backward.default not in op_implementations_dict:
    register_op_impl(_ATEN.upsample_bilinear2d_backward.default)(_upsampled_from)


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
    return table
