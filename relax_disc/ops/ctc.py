"""Connectionist temporal classification and its gradient, padded targets with lengths.

PyTorch's own operator sizes a result by the data of the lengths; here the padded targets say how
large it may become.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tvm import relax, tirx

from relax_disc.ops import registry

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


def ctc_loss(
    log_probs: relax.Expr,
    targets: relax.Expr,
    input_lengths: relax.Expr,
    target_lengths: relax.Expr,
    *,
    blank: int,
) -> relax.Call:
    """Build ``relax_disc.ctc_loss``.

    Parameters
    ----------
    log_probs : relax.Expr
        ``[T, N, C]``, float32 or float64.
    targets : relax.Expr
        ``[N, S]``, int64 labels, padded by anything.
    input_lengths, target_lengths : relax.Expr
        ``[N]``, int64.
    blank : int
        The label of no label.

    Returns
    -------
    relax.Call
        Of type ``Tuple(loss [N], alpha [N, T, 2 S + 1])``: the loss is infinite where no path
        gives the target; ``alpha`` is what the gradient needs.
    """
    args = [log_probs, targets, input_lengths, target_lengths]
    return registry.call("relax_disc.ctc_loss", args, {"blank": int(blank)})


def ctc_loss_backward(
    grad: relax.Expr,
    log_probs: relax.Expr,
    targets: relax.Expr,
    input_lengths: relax.Expr,
    target_lengths: relax.Expr,
    loss: relax.Expr,
    alpha: relax.Expr,
    *,
    blank: int,
) -> relax.Call:
    """Build ``relax_disc.ctc_loss_backward``: the gradient of ``log_probs``.

    Parameters
    ----------
    grad : relax.Expr
        Gradient by ``loss``, ``[N]``.
    log_probs, targets, input_lengths, target_lengths, blank
        As given to :func:`ctc_loss`.
    loss, alpha : relax.Expr
        Results of :func:`ctc_loss`.
    """
    args = [grad, log_probs, targets, input_lengths, target_lengths, loss, alpha]
    return registry.call("relax_disc.ctc_loss_backward", args, {"blank": int(blank)})


def _infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    log_probs = registry.tensor_type(call.args[0], "relax_disc.ctc_loss: log_probs", 3)
    targets = registry.tensor_type(call.args[1], "relax_disc.ctc_loss: targets", 2)
    steps, count, _ = registry.extents(log_probs)
    labels = registry.extents(targets)[1]
    one, two = (tirx.IntImm("int64", k) for k in (1, 2))
    states = labels * two + one
    dtype = registry.dtype_name(log_probs)
    return relax.TupleType(
        [relax.TensorType([count], dtype), relax.TensorType([count, steps, states], dtype)]
    )


def _infer_backward(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    return registry.tensor_type(call.args[1], "relax_disc.ctc_loss_backward: log_probs", 3)


registry.register("relax_disc.ctc_loss", _infer, "Connectionist temporal classification.")
registry.register(
    "relax_disc.ctc_loss_backward",
    _infer_backward,
    "Gradient of connectionist temporal classification by the logarithms of probabilities.",
)


def _fake_ctc_loss(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    steps, count = log_probs.shape[:2]
    alpha = log_probs.new_empty((count, steps, 2 * targets.shape[1] + 1))
    return log_probs.new_empty((count,)), alpha


_INPUTS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
registry.traced(
    f"ctc_loss_backward(Tensor grad, {_INPUTS}, Tensor loss, Tensor alpha, SymInt blank) -> Tensor",
    lambda grad, log_probs, *_: log_probs.new_empty(log_probs.shape),
    ctc_loss_backward,
    ("blank",),
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


registry.traced(
    f"ctc_loss({_INPUTS}, SymInt blank) -> (Tensor, Tensor)",
    _fake_ctc_loss,
    ctc_loss,
    ("blank",),
    gradient=(_gradient, _save),
)
