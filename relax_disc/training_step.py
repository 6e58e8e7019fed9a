"""One compiled training step: a callable that updates PyTorch's own model and optimizer.

``loss = step(*batch)`` checks the batch, binds what PyTorch has replaced since the last call, reads
the hyper-parameters, runs the compiled function and counts the step.  Everything that can be
refused is refused before the first kernel, when nothing has changed yet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import tvm
from tvm import relax

from relax_disc.errors import InputMismatchError, StepTornError
from relax_disc.frontend.spec import CapturedStep
from relax_disc.training import saved_step
from relax_disc.training.accumulation import Accumulation, SummingFunction
from relax_disc.training.batch import BatchSchema
from relax_disc.training.compiled_function import CompiledFunction
from relax_disc.training.counters import StepCounters, fill
from relax_disc.training.interrupt import deferred_interrupt
from relax_disc.training.memory_plan import MemoryPlan, MemoryReport
from relax_disc.training.tear import Tear

_Programs = tuple[saved_step.Program, saved_step.Program]


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
    accumulation_programs : callable or None
        Makes the programs that accumulation needs; None after `load`.
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
        hyper = [captured.inputs[group.hyper_input] for group in captured.update_groups]
        self._vectors = [
            torch.zeros(int(spec.shape[0]), dtype=getattr(torch, spec.dtype)) for spec in hyper
        ]
        self.bind_hyper_parameters(self._vectors)
        self._optimizer = optimizer
        self._library = library
        self.loss_fn: Callable[..., Any] | None = None
        self.max_grad_norm: float | None = None
        self.accumulation_programs: Callable[[], _Programs] | None = None
        self._loaded_programs: _Programs | None = None
        self._accumulation: Accumulation | None = None
        self._accumulated = False
        self.check_finite = False
        self._last: CompiledFunction = self
        self._tear: Tear | None = None
        self._norm: torch.Tensor | None = None

    def __call__(self, *batch: Any, update: bool = True, **named: Any) -> Any:
        """Run one step.

        Parameters
        ----------
        *batch, **named
            As in ``example_inputs``, at any shape in the ranges.
        update : bool
            False adds the batch's gradients into ``p.grad`` and updates nothing; the next call
            with True adds its own, clips and updates once from the sum and sets ``p.grad`` to None,
            like ``optimizer.step(); optimizer.zero_grad()``.  Gradients are summed: for a mean over
            N batches divide the loss by N in ``loss_fn``.  The first use compiles two more
            functions; they share the step's arena and budget.

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
            With `check_finite`, the loss is NaN or infinite; no parameter and no gradient has been
            written.
        StepTornError
            A kernel failed after parameters or gradients had been written, now or at an earlier
            call.
        """
        with self._lock, deferred_interrupt():
            return self._run(self._function_for(update), batch, named)

    def plan(self, *, update: bool = True, **dims: int) -> MemoryPlan:
        """Tell the memory and modelled time of a shape under the present budget; runs nothing.

        Parameters
        ----------
        update : bool
            As in the call that is asked about.  While there are sums of gradients they count as
            resident; with False they do before there are any, and the first use compiles.
        **dims : int
            A size for every dim, by its name.

        Raises
        ------
        ShapeRangeError
            A dim is missing, unknown or out of its range.
        """
        with self._lock:
            return self._function_for(update)._plan(dims, self.memory_budget)

    def memory_report(self) -> MemoryReport:
        """Tell what the last call used, counted while it ran."""
        return super().memory_report() if self._last is self else self._last.memory_report()

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
        """Put parameters, buffers, optimizer state and counts back when the block ends.

        Sums of gradients are put aside meanwhile: inside there are none.
        """
        with self._lock:
            self._binding.refresh()
            tensors = [self._binding.tensor(index) for index in self._written]
            for counter in self._counters:
                tensors += counter.tensors
            saved = [tensor.detach().clone() for tensor in tensors]
            marks = [counter.mark() for counter in self._counters]
            rng, accumulated = self.rng_state, self._accumulated
            sums = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
            for parameter, _ in sums:
                parameter.grad = None
            self._accumulated = False
            try:
                yield
            finally:
                for parameter in self._model.parameters():
                    parameter.grad = None
                for parameter, gradient in sums:
                    parameter.grad = gradient
                self._accumulated = accumulated
                if self._accumulation is not None:
                    self._accumulation.forget_gradients()
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
            accumulation = self._known_programs()
            if accumulation is not None:
                programs["adding"], programs["updating"] = accumulation
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
        if "adding" in programs:
            step._loaded_programs = programs["adding"], programs["updating"]
        step.memory_budget = settings["memory_budget"]
        step.check_finite = settings["check_finite"]
        step.max_grad_norm = settings["max_grad_norm"]
        return step

    def _functions(self) -> tuple[CompiledFunction, ...]:
        if self._accumulation is None:
            return (self,)
        return (self, self._accumulation.adding, self._accumulation.updating)

    def _fits(self, dims: Mapping[str, int], budget: int) -> bool:
        """While gradients are summed both kinds of call must fit."""
        function = self._function_for(True)
        if not function._plan(dims, budget).fits:
            return False
        return function is self or self._function_for(False)._plan(dims, budget).fits

    def _function_for(self, update: bool) -> CompiledFunction:
        """Choose what a call runs: the plain step where nobody has summed gradients before."""
        if update and not (self._accumulated and self._summing().has_sums()):
            return self
        return self._summing().updating if update else self._summing().adding

    def _summing(self) -> Accumulation:
        if self._accumulation is None:
            programs = self._known_programs()
            if programs is None:
                if self.accumulation_programs is None:
                    raise InputMismatchError(
                        "This step was saved without the functions for update=False; call it once "
                        "with update=False before saving it."
                    )
                programs = self.accumulation_programs()
            self._accumulation = Accumulation(programs, self, self._optimizer, self._vectors)
        return self._accumulation

    def _known_programs(self) -> _Programs | None:
        """The programs of accumulation, if they were compiled or loaded."""
        return self._loaded_programs if self._accumulation is None else self._accumulation.programs

    def _run(
        self, function: CompiledFunction, batch: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        self._refuse_torn()
        self._check_mode()
        tensors, values = self._schema.bind(batch, named)
        fill(self._vectors, self._counters, check=self.check_finite)
        if isinstance(function, SummingFunction):
            function.set_check(self.check_finite)
        self._last = function
        try:
            flat = function._execute(tensors, values)
        except Exception as error:
            self._note_failure(function, error)
            raise
        kinds = [out.kind for out in function._returned]
        if "norm" in kinds:
            self._norm = flat[kinds.index("norm")]
        if self._accumulation is not None and function is self._accumulation.adding:
            self._accumulated = True
        else:
            self._count_update(function)
        return (flat[0], function._extras(flat)) if "extra" in kinds else flat[0]

    def _count_update(self, function: CompiledFunction) -> None:
        """Do what is due after an update."""
        for counter in self._counters:
            counter.advance()
        # What the wrapper that a learning-rate scheduler puts round optimizer.step would set.
        self._optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        if function is not self:
            self._summing().clear()
            self._accumulated = False

    def _note_failure(self, function: CompiledFunction, error: Exception) -> None:
        """Remember what was written, so that a later call knows when it has been loaded again."""
        if not function._session.torn:
            return
        self._tear = Tear(function)
        raise StepTornError(
            f"The step failed after some tensors had been written ({error}). {self._tear.advice}"
        ) from error

    def _refuse_torn(self) -> None:
        if self._tear is not None:
            self._tear.mend()
            self._tear = None
