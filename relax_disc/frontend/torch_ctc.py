"""A torch operator that keeps connectionist temporal classification whole while it is traced.

PyTorch's own operator sizes a result by the data of the lengths; here the padded targets say how
large it may become.  The bodies run eagerly, through PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AutogradContext = Any


@torch.library.custom_op("relax_disc::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """Loss of each sequence; see :func:`relax_disc.ops.ctc_loss`."""
    loss, known = torch.ops.aten._ctc_loss(
        log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank
    )
    alpha = _alpha(log_probs, targets).fill_(float("-inf"))
    alpha[:, : known.shape[1], : known.shape[2]] = known
    return loss, alpha


@ctc_loss.register_fake
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int
) -> Any:
    return log_probs.new_empty((log_probs.shape[1],)), _alpha(log_probs, targets)


def _alpha(log_probs: Tensor, targets: Tensor) -> Tensor:
    states = 2 * targets.shape[1] + 1
    return log_probs.new_empty((log_probs.shape[1], log_probs.shape[0], states))


@torch.library.custom_op("relax_disc::ctc_loss_backward", mutates_args=())
def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    alpha: Tensor,
    blank: int,
) -> Tensor:
    """Gradient of :func:`ctc_loss` by the logarithms of the probabilities."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    known = alpha[:, :, : 2 * max(lengths[1], default=0) + 1].contiguous()
    result = torch.ops.aten._ctc_loss_backward(
        grad, log_probs, targets, *lengths, loss, known, blank, False
    )
    silent = torch.isinf(loss) & (grad == 0)
    return torch.where(silent[None, :, None], 0.0, result)


@ctc_loss_backward.register_fake
def _(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    alpha: Tensor,
    blank: int,
) -> Any:
    return log_probs.new_empty(log_probs.shape)


def _save(ctx: AutogradContext, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, ctx.blank = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: AutogradContext, grad: Tensor, _alpha: Tensor) -> Any:
    result = torch.ops.relax_disc.ctc_loss_backward(grad, *ctx.saved_tensors, ctx.blank)
    return result, None, None, None, None


ctc_loss.register_autograd(_gradient, setup_context=_save)
