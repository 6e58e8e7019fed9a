"""Sum gradients over batches into ``p.grad``, and update from the sum: two functions of a step.

They are compiled at their first use, from the same model and batch, into one module.  One adds a
batch's gradients in place; the other adds those of the last batch, clips and updates.  Both work in
the step's own arena, under its budget, which counts the sums as memory that is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from relax_disc.errors import InputMismatchError, OutOfMemoryError, RelaxDiscWarning
from relax_disc.frontend.optimizer.several import groups_of
from relax_disc.training.cache.saved_step import Program
from relax_disc.training.compiled_function import CompiledFunction, bind_vector

Programs = tuple[Program, Program]

_WAITING = "_relax_disc_waiting"
"""Attribute of a gradient that calls with ``update=False``, of whichever step, have added to: True
while it waits for an update, False once an update has used it."""


class Summing(CompiledFunction):
    """A function that reads and writes ``p.grad``; its tensors are bound while they exist."""

    _adding: list[torch.Tensor]

    def bind_check(self) -> None:
        """Bind the flags that tell whether the loss is checked before anything is added."""
        self._adding = [
            bind_vector(self._binding, index, int(spec.shape[0]), spec.dtype)
            for index, spec in enumerate(self._captured.inputs)
            if spec.kind == "adding"
        ]

    def parameters(self) -> list[torch.nn.Parameter]:
        """List the parameters that get gradients, in the order of the program."""
        return [
            self._model.get_parameter(out.name)
            for out in self._captured.outputs
            if out.kind == "gradient"
        ]

    def set_check(self, check: bool) -> None:
        """Refuse a loss that is not finite before anything is added."""
        for vector in self._adding:
            vector.fill_(float(check))

    def forget_gradients(self) -> None:
        """Let go of the sums' memory."""
        self._binding.release_gradients()

    def _execute(self, tensors: Sequence[torch.Tensor], values: Mapping[str, int]) -> list[Any]:
        """Run with sums that begin at zero where there are none; a refusal leaves none behind."""
        missing = [p for p in self.parameters() if p.grad is None]
        if missing:
            # Before their memory is taken: what does not fit must not be there for a moment.
            self._variants.check_budget(self._values(values))
        try:
            _begin_sums(missing)
            return super()._execute(tensors, values)
        except BaseException:
            if not self._variants.torn:
                for parameter in missing:
                    parameter.grad = None
                if missing:
                    self.forget_gradients()
            raise


class SummingFunction(Summing):
    """One of the functions of accumulation."""

    def __init__(self, program: Program, sibling: CompiledFunction, optimizer: Any) -> None:
        super().__init__(program.captured, program.executable, sibling._model, optimizer, sibling)
        self.bind_check()


def _begin_sums(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Give parameters gradients of zero.

    Raises `OutOfMemoryError`: the system refuses their memory.
    """
    for parameter in parameters:
        try:
            parameter.grad = torch.zeros_like(
                parameter, memory_format=torch.contiguous_format, requires_grad=False
            )
        except RuntimeError as error:  # PyTorch's way to say it
            size = sum(p.numel() * p.element_size() for p in parameters)
            raise OutOfMemoryError(
                f"The system has no {size} bytes for the sums of gradients; nothing was changed. "
                "Accumulation needs them beside parameters and optimizer state."
            ) from error


def _mark(parameters: Sequence[torch.nn.Parameter], *, waiting: bool) -> None:
    """Note on gradients whether they wait for an update."""
    for gradient in (p.grad for p in parameters):
        if gradient is not None:
            setattr(gradient, _WAITING, waiting)


def _is_used(gradient: torch.Tensor) -> bool:
    return getattr(gradient, _WAITING, None) is False


class Accumulation:
    """The functions of a step that sum gradients, made when they are first needed.

    ``programs`` are that which adds and that which updates, of one executable, or what makes them;
    ``ready`` gets each function when it has been made.

    ``programs``: what was compiled or loaded. ``started``: whether gradients were added since the
    last update.
    """

    def __init__(
        self,
        step: CompiledFunction,
        optimizer: Any,
        vectors: Sequence[torch.Tensor],
        ready: Callable[[CompiledFunction], None],
        programs: Programs | Callable[[], Programs] | None = None,
    ) -> None:
        self._step, self._optimizer, self._vectors, self._ready = step, optimizer, vectors, ready
        self._made: tuple[SummingFunction, SummingFunction] | None = None
        self._compile = programs if callable(programs) else None
        self.programs = None if callable(programs) else programs
        self.started = False
        self._trained = [
            step._model.get_parameter(out.name)
            for out in step._captured.outputs
            if out.kind in ("parameter", "gradient")
        ]
        self._held = [p for _, group in groups_of(optimizer) for p in group["params"]]
        self._has_warned = False

    def known(self) -> tuple[SummingFunction, ...]:
        """Return the functions, if they have been needed."""
        return self._made or ()

    def function_for(self, update: bool, keep: bool = False) -> CompiledFunction:
        """Choose what a call runs: the plain step where no gradients wait or shall be kept.

        Raises `InputMismatchError`: the functions are needed and cannot be made: the step was
        saved without them, or the model is not as it was when the step was compiled; or there is
        nothing to update, or gradients shall be kept where others lie; or another step's sums wait
        for an update of parameters that this step does not train.
        """
        if self._optimizer is None:
            if update:
                raise InputMismatchError(
                    "This step was compiled without an optimizer: call step(*batch, update=False), "
                    "which adds the gradients into p.grad, then your optimizer's step() and "
                    "zero_grad()."
                )
            return self._step
        # Where all have been cleared, or another step's update has used them, the sum has ended:
        # what is in p.grad later is another's.
        self.started = self.started and any(
            p.grad is not None and not _is_used(p.grad) for p in self._functions()[0].parameters()
        )
        others = update and self._others_wait()
        if update and not self.started and not others:
            if not keep:
                self._warn_of_others()
                return self._step
            if self._holds_others():
                raise InputMismatchError(
                    "p.grad holds gradients that this step has not made, of a backward() of yours "
                    "perhaps; with keep_gradients=True they would be added to its own. Clear them "
                    "first (`zero_grad()`)."
                )
        return self._functions()[int(update)]

    def _others_wait(self) -> bool:
        """Whether another step has summed gradients that the optimizer's update would use.

        Raises `InputMismatchError`: some are of parameters that this step does not train.
        """
        waiting = [p for p in self._held if p.grad is not None and getattr(p.grad, _WAITING, False)]
        trained = set(map(id, self._trained)) if waiting else set()
        if beyond := {id(p) for p in waiting if id(p) not in trained}:
            named = [name for name, p in self._step._model.named_parameters() if id(p) in beyond]
            raise InputMismatchError(
                f"p.grad of {named[0] if named else 'a parameter'} holds gradients that another "
                "step has added with update=False, and this step does not train it: its update "
                "would leave them out. Call this step with update=False, too, then the optimizer's "
                "own step() and zero_grad(); or clear them (`zero_grad()`)."
            )
        return bool(waiting)

    def _holds_others(self) -> bool:
        """Whether gradients lie in ``p.grad`` of which no update that left them there knows."""
        return any(p.grad is not None and not _is_used(p.grad) for p in self._trained)

    def _warn_of_others(self) -> None:
        """Say once that gradients in ``p.grad`` which no step has made are not used."""
        if self._has_warned or not self._holds_others():
            return
        self._has_warned = True
        warnings.warn(
            "p.grad holds gradients that this step has not made, of a backward() of yours perhaps: "
            "the step leaves them out, and leaves them there. Clear them (`zero_grad()`) if they "
            "are not needed; a sum of gradients that starts with step(..., update=False) includes "
            "what is there.",
            RelaxDiscWarning,
            stacklevel=4,
        )

    def note(self, function: CompiledFunction, keep: bool = False) -> bool:
        """Do what is due after a call: drop the sums when they were used; return if it updated."""
        if isinstance(function, Summing) and (self._made is None or function is self._made[0]):
            self.started = self._made is not None
            _mark(function.parameters(), waiting=True)
            return False
        if self._made is None or function is self._step:
            return True
        parameters = self._made[0].parameters()
        _mark(parameters, waiting=False)
        self.started = False
        if not keep:
            self.drop_kept()
        return True

    def drop_kept(self) -> None:
        """Drop the gradients that an earlier update has used, of whichever step."""
        used = [p for p in self._trained if p.grad is not None and _is_used(p.grad)]
        for parameter in used:
            parameter.grad = None
        if used:
            self.forget_gradients()

    def keeps(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Say whether some of these are gradients that an update has used and left."""
        return any(map(_is_used, gradients))

    def forget_gradients(self) -> None:
        """Let go of the sums' memory, which their owner has dropped or put aside."""
        alone: Any = (self._step,) if self._optimizer is None else ()
        for function in (*self.known(), *alone):
            function.forget_gradients()

    def _functions(self) -> tuple[SummingFunction, SummingFunction]:
        if self._made is None:
            if self.programs is None:
                if self._compile is None:
                    raise InputMismatchError(
                        "This step was saved without the functions for update=False; call it once "
                        "with update=False before saving it."
                    )
                self._step.check_unchanged()  # or another model would be compiled than the step's
                self.programs = self._compile()
            adding = SummingFunction(self.programs[0], self._step, self._optimizer)
            updating = SummingFunction(self.programs[1], adding, self._optimizer)
            self._made = adding, updating
            for function in self._made:
                function.bind_hyper_parameters(self._vectors)
                self._ready(function)
        return self._made
