"""Capture a PyTorch training step, or a forward pass, as one symbolic Relax function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torch import nn

from relax_disc.errors import InputMismatchError, RelaxDiscWarning
from relax_disc.frontend.capture.arguments import (
    Argument,
    is_foreign_parameter,
    list_arguments,
    outer_of,
)
from relax_disc.frontend.capture.exported.export import Exported, export, wrap_forward, wrap_step
from relax_disc.frontend.capture.fingerprint import fingerprint
from relax_disc.frontend.capture.refusals import refuse_model
from relax_disc.frontend.capture.source_lines import callers_depth
from relax_disc.frontend.capture.state.outer import Outer
from relax_disc.frontend.capture.traced.trace import Halves, trace_forward, trace_halves, trace_step
from relax_disc.frontend.capture.tracing import tracing
from relax_disc.frontend.emission import Wanted, emit_functions
from relax_disc.frontend.importer import refuse_unknown
from relax_disc.frontend.optimizer.several import owners_of
from relax_disc.frontend.optimizer.updates import describe_updates
from relax_disc.frontend.spec import CapturedStep, UpdateGroup

ADDING, UPDATING = "add_gradients", "update_from_sum"
"""Names of the functions of `ExportedStep.capture_accumulation`."""


@dataclass(frozen=True, slots=True)
class ExportedStep:
    """A model and its loss as PyTorch exports them, before their gradients are traced.

    ``exported``: the forward pass. ``scaled``: whether the gradients are those of the loss times a
    scale, an input of the function. All else is as given.
    """

    exported: Exported
    model: nn.Module
    optimizer: Any
    max_grad_norm: float | None
    scaled: bool = False

    def fingerprint(
        self, *, accumulate: bool = False, groups: Sequence[UpdateGroup] | None = None
    ) -> str | None:
        """Hash what decides the result of `capture`, but for versions and sources.

        Values of parameters and of hyper-parameters, which calls read, and sizes of the example
        make no difference.  None where the hash could not be trusted: see
        :func:`.fingerprint.fingerprint`.

        The function, or with ``accumulate`` the two of `capture_accumulation` for these ``groups``.
        """
        arguments, position = self._arguments()
        settings = [
            sorted(position.items()),
            describe_updates(self.optimizer, arguments),
            repr(self.max_grad_norm),
            self.scaled,
            accumulate,
            None if groups is None else [astuple(group) for group in groups],
        ]
        return fingerprint(self.exported, arguments, settings)

    def outer(self) -> Outer:
        """Return what the function reads besides the model, the optimizer and the batch."""
        return outer_of(self._arguments()[0], self.exported)

    def tell_foreign_parameters(self) -> None:
        """Warn that parameters of others get no gradients, though the loss reads them."""
        names = [str(a.target) for a in self._arguments()[0] if is_foreign_parameter(a)]
        if names:
            warnings.warn(
                f"The loss reads {names[0]}"
                + (f" and {len(names) - 1} more parameters" if names[1:] else "")
                + " that the model does not have. Eager PyTorch would make gradients of them, a "
                "step of its model's alone: compile torch.nn.ModuleList([model, other]) to train "
                "both, or call requires_grad_(False) on what is not trained.",
                RelaxDiscWarning,
                stacklevel=callers_depth(),
            )

    def capture(self) -> CapturedStep:
        """Trace the gradients and make the Relax function ``main``.

        It returns ``(loss, *extras[, norm][, overflow], *buffers, *parameters, *states)``, with
        gradients in the place of parameters and states when there is no optimizer.
        """
        wanted = Wanted(optimizer=self.optimizer, max_grad_norm=self.max_grad_norm)
        return self._functions(wanted)[0]

    def capture_gradients(self) -> CapturedStep:
        """Make the function that adds the gradients to the sums so far, and updates nothing."""
        return self._functions(Wanted(accumulate=True, update=False))[0]

    def capture_accumulation(
        self, groups: Sequence[UpdateGroup] | None = None
    ) -> tuple[CapturedStep, CapturedStep]:
        """Make the two functions that sum gradients over batches, in one module.

        Both take the optimizer's state, so that it counts as memory of the call, and the sums,
        which they write in place.

        ``groups``: update groups of the function of `capture`; by default as that would make them.
        The first returns ``(loss, *extras, *buffers, *sums)`` and updates nothing else; the second
        ``(loss, *extras[, norm][, overflow], *buffers, *sums, *parameters, *states)``: the sums
        include this batch's gradients; they are clipped, and the update is made from them.
        """
        common: Any = {"optimizer": self.optimizer, "groups": groups, "accumulate": True}
        adding = Wanted(function=ADDING, update=False, **common)
        updating = Wanted(function=UPDATING, max_grad_norm=self.max_grad_norm, **common)
        first, second = self._functions(adding, updating)
        return first, second

    def _arguments(self) -> tuple[Sequence[Argument], dict[str, int]]:
        return list_arguments(self.exported.program, self.model, self.exported.outer)

    def _functions(self, *wanted: Wanted) -> Sequence[CapturedStep]:
        with tracing():
            held = owners_of(self.optimizer)
            traced = trace_step(self.exported, self.model, self.scaled, held)
        refuse_unknown(traced)
        if not traced.gradients:
            raise InputMismatchError(
                "The loss does not depend on any parameter that requires a gradient; "
                "use capture_forward for inference."
            )
        return emit_functions(self.exported, traced, wanted)


def export_step(
    model: nn.Module,
    optimizer: Any,
    example_inputs: Any,
    *,
    dynamic_shapes: Any,
    loss_fn: Callable[..., Any] | None = None,
    max_grad_norm: float | None = None,
    scaled: bool = False,
) -> ExportedStep:
    """Export forward and loss, from which forward, gradients and update are captured.

    Nothing is changed: neither the model nor the optimizer, which keep their tensors.

    Parameters
    ----------
    model : torch.nn.Module
        In the mode, ``train()`` or ``eval()``, in which it shall run.
    optimizer : torch.optim.Optimizer, list of them or None
        Of any class whose ``step`` can be traced; with ``None`` the gradients themselves are
        returned.
    example_inputs : tuple, mapping or object
        Positional arguments, keyword arguments, or the only argument of the step.  Its tensors
        are only looked at; a dynamic axis of size 1 is traced as if it were longer.
    dynamic_shapes : object
        As ``torch.export.export`` takes it, for the arguments of the step.
    loss_fn : callable, optional
        ``loss_fn(model, *batch)`` returns the loss, or ``(loss, extra outputs)``.  Without it the
        model's output is the loss, has ``.loss``, holds ``"loss"``, or is a tuple that begins with
        it.
    max_grad_norm : float, optional
        Clip the gradients of all trained parameters by their global norm; the norm becomes an
        output.
    scaled : bool
        Take the gradients of the loss times a scale, an input, as `torch.amp.GradScaler` does. An
        optimizer whose gradients are not all finite updates nothing; an output tells.

    Raises
    ------
    UnsupportedOperatorError
        Something in the model or the optimizer cannot be translated.
    ShapeRangeError
        The model contradicts ``dynamic_shapes``.
    InputMismatchError
        The arguments do not fit the model, or there is no loss.
    """
    refuse_model(model, trained=True, scaled=scaled)
    with tracing():
        exported = export(wrap_step(model, loss_fn), example_inputs, dynamic_shapes)
    return ExportedStep(exported, model, optimizer, max_grad_norm, scaled)


def capture_step(
    model: nn.Module, optimizer: Any, example_inputs: Any, **options: Any
) -> CapturedStep:
    """Capture forward, gradients and update as one Relax function: `export_step` and `capture`."""
    return export_step(model, optimizer, example_inputs, **options).capture()


def capture_forward(model: nn.Module, example_inputs: Any, *, dynamic_shapes: Any) -> CapturedStep:
    """Capture the forward pass alone; every output is of kind ``"extra"``.

    Parameters, errors and the result are as in :func:`capture_step`; buffers that the forward pass
    changes are outputs too.
    """
    refuse_model(model, trained=False)
    with tracing():
        exported = export(wrap_forward(model), example_inputs, dynamic_shapes)
        traced = trace_forward(exported, model)
    refuse_unknown(traced)
    return emit_functions(exported, traced, [Wanted(forward=True)])[0]


def capture_halves(
    function: nn.Module, example_inputs: Any, *, dynamic_shapes: Any, halves: Halves
) -> CapturedStep:
    """Capture outputs and, in a second half, gradients, for a caller who makes the loss himself.

    Everything that ``function`` reads is an argument of it; it has no tensors of its own.

    Returned: ``(*outputs, *arguments that it writes, *gradients)``; inputs of kind
    ``"output_gradient"`` come last and late: see :mod:`relax_disc.transform.memory.plan_arena`.
    """
    with tracing():
        exported = export(wrap_forward(function), example_inputs, dynamic_shapes)
        traced = trace_halves(exported, function, halves)
    refuse_unknown(traced)
    return emit_functions(exported, traced, [Wanted(forward=True)])[0]
