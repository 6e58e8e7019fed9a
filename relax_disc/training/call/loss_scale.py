"""Loss scaling: a compiled step drives the user's own `torch.amp.GradScaler`.

The program reads the scale, multiplies the loss with it, and says which optimizers' gradients were
not all finite; those have updated nothing.  After the update the scaler is told, so that it grows
and shrinks the scale by its own rules, and its ``get_scale()`` and ``state_dict()`` are as after
the eager loop.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from relax_disc.errors import InputMismatchError

_MARK = "_relax_disc_made_update"
_DRIVEN: weakref.WeakSet[GradScaler] = weakref.WeakSet()


class LossScale:
    """What the functions of one step share: the scale as their programs read it, and the scaler.

    ``tensor``: the scale, float32 without axes, where the kernels run. ``scaler``: the user's.
    ``skipped``: how many updates were left out because a gradient was not finite.
    """

    def __init__(self, scaler: GradScaler, device: torch.device, *, drives: bool) -> None:
        self.scaler, self.skipped = scaler, 0
        self.tensor = torch.ones((), dtype=torch.float32, device=device)
        # How the scaler learns of an overflow: from a gradient that it unscales.
        self._probe = torch.nn.Parameter(torch.zeros((), device=device))
        scaler.scale(self._probe)  # makes its tensors, as the first use would
        self._messenger = torch.optim.SGD([self._probe], lr=0.0)
        if drives:
            _DRIVEN.add(scaler)

    def read(self) -> None:
        """Let the coming call use the scaler's present scale."""
        self.tensor.fill_(self.scaler.get_scale())

    def settle(self, overflows: Sequence[bool]) -> None:
        """Tell the scaler of an update, in which some optimizers may have been left out."""
        overflow = any(overflows)
        self.skipped += overflow
        self._probe.grad = torch.full_like(self._probe, math.inf if overflow else 0.0)
        self.scaler.unscale_(self._messenger)
        self.scaler.update()

    def unscale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Divide gradients by the scale that the last call used, in place."""
        inverse = self.tensor.double().reciprocal().float()
        if gradients:
            torch._foreach_mul_(list(gradients), inverse)  # pyright: ignore[reportPrivateImportUsage]

    def mark(self) -> tuple[dict[str, Any], int]:
        """Return what `restore` takes."""
        return self.scaler.state_dict(), self.skipped

    def restore(self, mark: tuple[dict[str, Any], int]) -> None:
        """Go back to a mark."""
        state, self.skipped = mark
        self.scaler.load_state_dict(state)


def check_scaler(scaler: Any) -> GradScaler | None:
    """Return the scaler if it scales.

    Raises `InputMismatchError`: it is no `torch.amp.GradScaler`.
    """
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise InputMismatchError(
            f"scaler must be a torch.amp.GradScaler or None, not {type(scaler).__name__}."
        )
    return scaler if scaler is not None and scaler.is_enabled() else None


def mark_loss(loss: torch.Tensor) -> None:
    """Remember that a loss belongs to a call that has taken its gradients already."""
    setattr(loss, _MARK, True)


def watch_backward() -> None:
    """Let ``loss.backward()`` say that a compiled step has taken the gradients.

    PyTorch's own error names neither the step nor what to do; nothing else changes.
    """
    backward = torch.autograd.backward  # what Tensor.backward calls
    if hasattr(backward, "__wrapped__"):
        return

    @functools.wraps(backward)
    def told(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(tensors, _MARK) and not tensors.requires_grad:
            raise InputMismatchError(
                "loss.backward() was called with the loss of a compiled step, which has taken the "
                "gradients already, and made the update unless called with update=False: leave "
                "it out."
            )
        backward(tensors, *args, **kwargs)

    setattr(torch.autograd, "backward", told)  # noqa: B010 - a function of PyTorch's


def watch_scalers() -> None:
    """Let the eager way of using a GradScaler say what a compiled step does in its place."""
    if hasattr(GradScaler.scale, "__wrapped__"):
        return
    scale = GradScaler.scale

    @functools.wraps(scale)
    def checked_scale(self: GradScaler, outputs: Any) -> Any:
        listed = outputs if isinstance(outputs, list | tuple) else [outputs]
        for loss in listed:
            is_tensor = isinstance(loss, torch.Tensor) and not loss.requires_grad
            if is_tensor and (hasattr(loss, _MARK) or self in _DRIVEN):
                raise InputMismatchError(
                    "scaler.scale() was called with the loss of a compiled step, which has taken "
                    f"the gradients already. {_ADVICE}"
                )
        return scale(self, outputs)

    setattr(GradScaler, "scale", checked_scale)  # noqa: B010 - a method of a class of PyTorch's
    for name in ("step", "update"):
        setattr(GradScaler, name, _checked(getattr(GradScaler, name)))


_ADVICE = (
    "Leave out scaler.scale(loss).backward(), scaler.unscale_(), scaler.step() and "
    "scaler.update(): a step from relax_disc.compile(..., scaler=scaler) scales the loss, clips "
    "unscaled gradients (max_grad_norm), leaves out updates that overflow, and updates the scaler. "
    "After step(*batch, update=False) the gradients in p.grad are scaled: there scaler.step() and "
    "scaler.update() are yours, without scaler.scale()."
)


def _checked(method: Any) -> Any:
    """Make a method of the scaler say more where a compiled step has done its work."""

    @functools.wraps(method)
    def checked(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except AssertionError as error:  # nothing was unscaled
            if self not in _DRIVEN:
                raise
            text = f"scaler.{method.__name__}() found nothing to do ({error})"
            raise InputMismatchError(f"{text}. {_ADVICE}") from error

    return checked
