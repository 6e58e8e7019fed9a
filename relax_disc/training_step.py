"""One compiled training step: a callable that updates PyTorch's own model and optimizer.

``loss = step(*batch)`` checks the batch, binds what PyTorch has replaced since the last call, reads
the hyper-parameters, runs the compiled function and counts the step.  Everything that can be
refused is refused before the first kernel, when nothing has changed yet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import tvm
from tvm import relax

from relax_disc.errors import InputMismatchError, StepTornError
from relax_disc.frontend.spec import CapturedStep
from relax_disc.training import saved_step
from relax_disc.training.accumulation import GradientFunction
from relax_disc.training.batch import BatchSchema
from relax_disc.training.compiled_function import CompiledFunction, bind_vector
from relax_disc.training.counters import StepCounters, fill
from relax_disc.training.interrupt import deferred_interrupt


class TrainingStep(CompiledFunction):
    """A compiled step; made by `relax_disc.compile`.

    Parameters
    ----------
    captured : CapturedStep
        What was captured: inputs, outputs, dims, update groups.
    executable : tvm.relax.VMExecutable or tvm.runtime.Module
        The program, for every shape.
    schema : BatchSchema
        What a batch must look like.
    model : torch.nn.Module
        Its parameters and buffers are updated in place.
    optimizer : torch.optim.Optimizer
        Its state is updated in place; state that is missing is created as PyTorch would.
    library : bytes, optional
        The executable as a shared library, where it is known already.

    Attributes
    ----------
    check_finite : bool
        Raise `NonFiniteLossError` before the first parameter is written when the loss is NaN or
        infinite.  False by default; may be changed between calls.
    loss_fn : callable or None
        As given to `relax_disc.compile`; None after `load`.
    max_grad_norm : float or None
        As given to `relax_disc.compile`.
    gradient_program : callable or None
        Makes the program that accumulation needs; None after `load`.
    """

    def __init__(
        self,
        captured: CapturedStep,
        executable: relax.VMExecutable | tvm.runtime.Module,
        schema: BatchSchema,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        library: bytes | None = None,
    ) -> None:
        # Before the binding, which creates the state whose absence the counters look for.
        self._counters = [StepCounters(group, model, optimizer) for group in captured.update_groups]
        super().__init__(captured, executable, schema, model, optimizer)
        self._vectors = []
        for group in captured.update_groups:
            spec = captured.inputs[group.hyper_input]
            length = int(spec.shape[0])
            self._vectors.append(bind_vector(self._binding, group.hyper_input, length, spec.dtype))
        self._optimizer = optimizer
        self._library = library
        self.loss_fn: Callable[..., Any] | None = None
        self.max_grad_norm: float | None = None
        self.gradient_program: Callable[[], saved_step.Program] | None = None
        self._gradients: tuple[saved_step.Program, GradientFunction] | None = None
        self._accumulated = False
        self.check_finite = False
        self._torn_versions: list[tuple[torch.Tensor, int]] | None = None
        self._norm: torch.Tensor | None = None

    def __call__(self, *batch: Any, update: bool = True, **named: Any) -> Any:
        """Run one step.

        Parameters
        ----------
        *batch, **named
            As in ``example_inputs``, at any shape in the ranges.
        update : bool
            False adds the batch's gradients into ``p.grad`` and updates nothing; the next call
            with True adds its own, updates once from the sum and sets ``p.grad`` to None, like
            ``optimizer.step(); optimizer.zero_grad()``.  Gradients are summed: for a mean over N
            batches divide the loss by N in ``loss_fn``.  The first use compiles a second program.

        Returns
        -------
        torch.Tensor or tuple
            The loss, without gradient; ``(loss, extras)`` where the model or ``loss_fn`` returned
            more than the loss.

        Raises
        ------
        InputMismatchError, ShapeRangeError
            The batch, the model or the optimizer does not fit the compiled step.
        MemoryBudgetError
            The shape cannot run inside the budget; nothing has run.
        NonFiniteLossError
            With `check_finite`, the loss is NaN or infinite; no parameter has been written.
        StepTornError
            A kernel failed after parameters had been written, now or at an earlier call.
        """
        with self._lock, deferred_interrupt():
            if update and not self._has_accumulated():
                return self._run(batch, named)
            result = self._accumulate(batch, named)
            if update:
                self._update_from_sum()
            return result

    def __repr__(self) -> str:
        dims = ", ".join(str(dim) for dim in self.dims) or "fixed shapes"
        budget = "no" if self.memory_budget is None else f"{self.memory_budget:,} bytes"
        return f"TrainingStep({type(self._model).__name__}, {dims}, memory budget: {budget})"

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """Global norm of the last step's gradients before clipping; None without clipping."""
        return self._norm

    @property
    def model(self) -> torch.nn.Module:
        """The model whose parameters the step updates."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose state the step updates."""
        return self._optimizer

    def first_use(self, target: str) -> str:
        """Return the model's line, ``"file:line"``, of the first kernel that reads a tensor.

        Parameters
        ----------
        target : str
            Full name of a parameter or buffer; ``""`` is returned where nothing is known.
        """
        given = [spec for spec in self._captured.inputs if spec.kind != "shape"]
        places = {
            index
            for index, spec in enumerate(given)
            if spec.target == target and spec.kind in ("parameter", "buffer")
        }
        metadata = self._session.metadata
        for kernel in metadata.kernels:
            if kernel.source and any(metadata.tensors[k].given in places for k in kernel.inputs):
                return kernel.source
        return ""

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put parameters, buffers, optimizer state and counts back when the block ends."""
        with self._lock:
            self._binding.refresh()
            tensors = [self._binding.tensor(index) for index in self._written]
            for counter in self._counters:
                tensors += counter.tensors
            saved = [tensor.detach().clone() for tensor in tensors]
            marks = [counter.mark() for counter in self._counters]
            rng = self.rng_state
            try:
                yield
            finally:
                with torch.no_grad():
                    for tensor, value in zip(tensors, saved, strict=True):
                        tensor.copy_(value)
                for counter, mark in zip(self._counters, marks, strict=True):
                    counter.restore(mark)
                if rng is not None:
                    self.rng_state = rng

    def forget_new_momentum(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remove momentum buffers that were made for the step but hold nothing yet.

        Parameters
        ----------
        model, optimizer
            The step's own, or copies, on which PyTorch is about to take its first step.
        """
        for counter in self._counters:
            counter.forget_new_momentum(model, optimizer)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compiled step into one file, without weights and optimizer state.

        The file appears whole or not at all, and holds native code for this processor and these
        library versions.  What training goes on from is saved beside it as usual:
        ``model.state_dict()``, ``optimizer.state_dict()`` and, with dropout, `rng_state`.

        Raises
        ------
        ArtefactError
            The batch holds something besides tensors that cannot be written down.
        """
        with self._lock:
            programs = {
                "step": saved_step.Program(
                    self._captured, self._schema, self._executable, self._library
                )
            }
            if self._gradients is not None:
                programs["gradients"] = self._gradients[0]
            settings = {
                "memory_budget": self.memory_budget,
                "check_finite": self.check_finite,
                "max_grad_norm": self.max_grad_norm,
            }
            saved_step.save(path, programs, settings, self._model, self._optimizer)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> TrainingStep:
        """Load a saved step for a model and an optimizer like those that it was compiled for.

        The file holds native code, which runs when the step does: load files that you trust only.

        Parameters
        ----------
        path : path-like
            Written by `save`.
        model, optimizer
            With the same modules, modes, tensors and parameter groups as when compiled; values and
            hyper-parameters may differ.

        Raises
        ------
        ArtefactError
            The file is damaged, or was made with other versions, for another processor, model or
            optimizer.  Nothing of it has been executed.
        """
        programs, settings = saved_step.load(path, model, optimizer)
        main = programs["step"]
        step = cls(main.captured, main.executable, main.schema, model, optimizer, main.library)
        if "gradients" in programs:
            step._bind_gradients(programs["gradients"])
        step.memory_budget = settings["memory_budget"]
        step.check_finite = settings["check_finite"]
        step.max_grad_norm = settings["max_grad_norm"]
        return step

    def _has_accumulated(self) -> bool:
        """Whether gradients were added that nobody has cleared since."""
        if not self._accumulated or self._gradients is None:
            return False
        return any(p.grad is not None for p in self._gradients[1].parameters())

    def _accumulate(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._refuse_torn()
        self._check_mode()
        function = self._gradient_function()
        if self.memory_budget is not None:
            self._session.release()  # two arenas at once would break the budget
        rng = self.rng_state
        if rng is not None:
            function.rng_state = rng
        held = self._binding.bytes_by_kind.get("state", 0)
        try:
            loss, extras = function.add_gradients(
                batch, named, budget=self.memory_budget, held=held, check=self.check_finite
            )
        finally:
            if self.memory_budget is not None:
                function.session.release()
        moved = function.rng_state
        if moved is not None:
            self.rng_state = moved
        self._accumulated = True
        has_extras = any(out.kind == "extra" for out in self._returned)
        return (loss, extras) if has_extras else loss

    def _update_from_sum(self) -> None:
        """Let PyTorch's optimizer update from ``p.grad``, and clear it."""
        function = self._gradient_function()
        parameters = function.parameters()
        if self.max_grad_norm is not None:
            self._norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        self.forget_new_momentum(self._model, self._optimizer)
        self._optimizer.step()
        for counter in self._counters:
            counter.note_filled()
        for parameter in parameters:
            parameter.grad = None
        self._accumulated = False

    def _gradient_function(self) -> GradientFunction:
        if self._gradients is None:
            if self.gradient_program is None:
                raise InputMismatchError(
                    "This step was saved without a program for update=False; call it once with "
                    "update=False before saving it."
                )
            self._bind_gradients(self.gradient_program())
        assert self._gradients is not None
        return self._gradients[1]

    def _bind_gradients(self, program: saved_step.Program) -> None:
        function = GradientFunction(
            program.captured, program.executable, program.schema, self._model, None
        )
        self._gradients = program, function

    def _run(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._refuse_torn()
        self._check_mode()
        tensors, values = self._schema.bind(batch, named)
        fill(self._vectors, self._counters, check=self.check_finite)
        self._binding.refresh()
        try:
            flat = self._call(tensors, values)
        except Exception as error:
            self._note_failure(error)
            raise
        self._mark_written()
        for counter in self._counters:
            counter.advance()
        # What the wrapper that a learning-rate scheduler puts round optimizer.step would set.
        self._optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        kinds = [out.kind for out in self._returned]
        if "norm" in kinds:
            self._norm = flat[kinds.index("norm")]
        return (flat[0], self._extras(flat)) if "extra" in kinds else flat[0]

    def _note_failure(self, error: Exception) -> None:
        """Remember what was written, so that a later call knows when it has been loaded again."""
        if not self._session.torn:
            return
        written = [self._binding.tensor(index) for index in self._written]
        self._torn_versions = [(tensor, tensor._version) for tensor in written]
        raise StepTornError(
            f"The step failed after some parameters had been written ({error}). Load a saved state "
            "into the model and the optimizer before the next step."
        ) from error

    def _refuse_torn(self) -> None:
        if self._torn_versions is None:
            return
        self._binding.refresh()
        for (old, version), index in zip(self._torn_versions, self._written, strict=True):
            now = self._binding.tensor(index)
            if now is old and now._version == version:
                raise StepTornError(
                    "An earlier step failed half-way, and "
                    f"{self._captured.inputs[index].name} has not been loaded again since. Load a "
                    "saved state into the model and the optimizer before the next step."
                )
        self._torn_versions = None
        self._session.clear_torn()
