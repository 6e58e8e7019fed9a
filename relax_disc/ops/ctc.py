"""Connectionist temporal classification and its gradient, padded targets with lengths.

PyTorch's own operator sizes a result by the data of the lengths; here the padded targets say how
large it may become.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tvm import relax

from relax_disc.ops import registry
from relax_disc.ops.registry import Kind

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


_INPUTS = "Tensor targets:2, Tensor input_lengths, Tensor target_lengths"


def _results(log_probs: Kind, targets: Kind, *_: Kind, **__: Any) -> list[tuple[Any, str]]:
    steps, count, _classes = log_probs.shape
    states = targets.shape[1] * 2 + 1
    return [((count,), log_probs.dtype), ((count, steps, states), log_probs.dtype)]


ctc_loss_backward = registry.operator(
    f"ctc_loss_backward(Tensor grad, Tensor log_probs:3, {_INPUTS}, Tensor loss, Tensor alpha,"
    " SymInt blank) -> Tensor",
    """Gradient of connectionist temporal classification by ``log_probs``.

    ``grad``: gradient by ``loss``, ``[N]``. ``loss``, ``alpha``: results of :func:`ctc_loss`. All
    else is as given to it.
    """,
    lambda grad, log_probs, *_, **__: [log_probs],
)


@registry.dispatches("relax_disc.ctc_loss", "relax_disc.ctc_loss_backward")
def dispatch(call: relax.Call, site: Site) -> relax.Expr:
    """Call the library: there is no other form."""
    result = site.original.ty
    name = call.op.name.removeprefix("relax_disc.")
    fields = list(result.fields) if isinstance(result, relax.TupleType) else result
    return site.call(name, [*call.args, int(registry.attribute(call, "blank"))], fields)


def _device_bytes(views: list[Any], numbers: list[Any], units: int) -> Any:
    """Bound what ``_ctc_loss`` takes on CUDA: its alpha and loss, and where sequences begin.

    ``aten/src/ATen/native/cuda/LossCTC.cu`` of PyTorch 2.13.
    """
    del numbers, units
    return registry.size_bytes(views[-1]) + 64 * views[-1].shape[0] + registry.SMALL_BYTES


def _backward_device_bytes(views: list[Any], numbers: list[Any], units: int) -> Any:
    """Bound its gradient: the loss again, beta as large as alpha, and the result three times."""
    del numbers, units
    log_probs, alpha = views[1], views[6]
    once = 2 * registry.size_bytes(alpha) + 3 * registry.size_bytes(log_probs)
    return once + 64 * alpha.shape[0] + registry.SMALL_BYTES


registry.LIBRARY["ctc_loss"] = registry.LibraryFunction(device_bytes=_device_bytes)
# The gradient's scratch: the labels that there is room for.
registry.LIBRARY["ctc_loss_backward"] = registry.LibraryFunction(
    workspace=lambda views, _: ("ctc_loss_backward", (views[2].shape[1],)),
    device_bytes=_backward_device_bytes,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, ctx.blank = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: Any, grad: Tensor, _alpha: Tensor) -> Any:
    result = torch.ops.relax_disc.ctc_loss_backward(grad, *ctx.saved_tensors, ctx.blank)
    return result, None, None, None, None


ctc_loss = registry.operator(
    f"ctc_loss(Tensor log_probs:3, {_INPUTS}, SymInt blank) -> (Tensor, Tensor)",
    """Connectionist temporal classification.

    ``log_probs`` are ``[T, N, C]``, float32 or float64, ``targets`` ``[N, S]``, int64 labels,
    padded by anything, both lengths ``[N]``, int64.  ``blank``: the label of no label.

    Of type ``Tuple(loss [N], alpha [N, T, 2 S + 1])``: the loss is infinite where no path gives the
    target; ``alpha`` is what the gradient needs.
    """,
    _results,
    gradient=(_gradient, _save),
)


@torch.library.impl("relax_disc::ctc_loss", ("CPU", "CUDA"))
def _computed(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int
) -> tuple[Tensor, ...]:
    """Compute it on the example batch, whose data decide a branch."""
    given = log_probs, targets, input_lengths, target_lengths
    loss, alpha = torch.ops.aten._ctc_loss(*given, blank)
    return loss, alpha.new_empty(log_probs.shape[1], log_probs.shape[0], 2 * targets.shape[1] + 1)
