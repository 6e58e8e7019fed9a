"""Connectionist temporal classification, which is traced whole."""

from __future__ import annotations

from typing import Any

from relax_disc import ops
from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter


@converts("relax_disc.ctc_loss.default")
def ctc_loss(
    emitter: Emitter,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
) -> Any:
    """The loss of each sequence."""
    call = ops.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=blank)
    return emitter.fields(call)


@converts("relax_disc.ctc_loss_backward.default")
def ctc_loss_backward(emitter: Emitter, *args: Any) -> Any:
    """The gradient of the logarithms of the probabilities."""
    *tensors, blank = args
    return emitter.emit(ops.ctc_loss_backward(*tensors, blank=blank))
