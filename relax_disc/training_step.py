"""One compiled training step: a callable that updates PyTorch's own model and optimizer.

``loss = step(*batch)`` checks the batch, binds what PyTorch has replaced since the last call, reads
the hyper-parameters, runs the compiled function and counts the step.  Everything that can be
refused is refused before the first kernel, when nothing has changed yet.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax

from relax_disc.errors import ArtefactError, InputMismatchError, RelaxDiscWarning, StepTornError
from relax_disc.frontend.optimizer.several import optimizers_of
from relax_disc.frontend.spec import CapturedStep
from relax_disc.training.accumulation import Accumulation, Programs, Summing
from relax_disc.training.cache import saved_step
from relax_disc.training.calibration import (
    Calibration,
    apply_to,
    machine_name,
    profiled,
    usable,
    write,
)
from relax_disc.training.call.batch import device_of
from relax_disc.training.call.counters import GroupWatch, StepCounters, fill
from relax_disc.training.call.graphs import SUMMED, GraphReport, StepGraphs
from relax_disc.training.call.hooks import watch_step
from relax_disc.training.call.interrupt import deferred_interrupt
from relax_disc.training.call.loss_scale import (
    LossScale,
    check_scaler,
    mark_loss,
    watch_backward,
    watch_scalers,
)
from relax_disc.training.call.snapshot import restored, without_gradients
from relax_disc.training.call.tear import Tear
from relax_disc.training.compiled_function import CompiledFunction
from relax_disc.training.memory_plan import MemoryPlan, MemoryReport
from relax_disc.vm_builtins.tier import check_offload


class TrainingStep(CompiledFunction):
    """A compiled step; made by `relax_disc.compile`.

    Parameters
    ----------
    captured : CapturedStep
        What was captured: inputs, outputs, dims, update groups.
    executable : tvm.relax.VMExecutable or tvm.runtime.Module
        The program, for every shape.
    model : torch.nn.Module
        Its parameters and buffers are updated in place.
    optimizer : torch.optim.Optimizer, list of them or None
        Its state is updated in place; state that is missing is created as PyTorch would.
    library : bytes, optional
        The executable as a shared library, where it is known already.
    loss_fn : callable, optional
        As given to `relax_disc.compile`; unknown after `load`.
    max_grad_norm : float, optional
        As given to `relax_disc.compile`.
    memory_budget : int, optional
        Bytes; may be changed between calls.
    check_finite : bool
        Raise `NonFiniteLossError` before anything is written when the loss, or a new value of a
        buffer, is NaN or infinite.  May be changed between calls.
    cuda_graphs : bool
        As given to `relax_disc.compile`.
    calibration : Calibration, optional
        Times that were measured on such a machine before.
    calibration_path : pathlib.Path, optional
        Where `calibrate` keeps what it measured, besides in the step.
    summing : pair of Program, or callable, optional
        The functions that sum gradients, or what makes them when they are first needed.
    scaler : torch.amp.GradScaler, optional
        As given to `relax_disc.compile`, where the program scales the loss.

    Attributes
    ----------
    accumulation : Accumulation
        The functions that sum gradients.
    """

    def __init__(
        self,
        captured: CapturedStep,
        executable: relax.VMExecutable | tvm.runtime.Module,
        model: torch.nn.Module,
        optimizer: Any,
        library: bytes | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        max_grad_norm: float | None = None,
        memory_budget: int | None = None,
        check_finite: bool = False,
        cuda_graphs: bool = False,
        calibration: Calibration | None = None,
        calibration_path: Path | None = None,
        summing: Programs | Callable[[], Programs] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        members = optimizers_of(optimizer)
        watch_scalers()
        watch_backward()
        self._watches = [GroupWatch(model, member) for member in members]
        self._counters = [
            StepCounters(group, model, optimizer)
            for group in captured.update_groups
            if optimizer is not None
        ]
        loss_scale = None
        if scaler is not None:
            loss_scale = LossScale(scaler, device_of(model), drives=bool(members))
        super().__init__(captured, executable, model, optimizer, loss_scale=loss_scale)
        hyper = [captured.inputs[group.hyper_input] for group in captured.update_groups]
        self._vectors = [
            torch.zeros(int(spec.shape[0]), dtype=getattr(torch, spec.dtype)) for spec in hyper
        ]
        self.bind_hyper_parameters(self._vectors)
        self._members = members
        self._optimizer = members[0] if len(members) == 1 else members or None
        self._has_updated = self._has_warned = False
        for member in members:
            watch_step(member, self._before_eager_step)
        self._library = library
        self.loss_fn, self._max_grad_norm = loss_fn, max_grad_norm
        self.accumulation = Accumulation(
            self, optimizer if members else None, self._vectors, self._model_times, summing
        )
        self.check_finite = check_finite
        self._graphs = StepGraphs(self, self._vectors) if cuda_graphs else None
        self._last: CompiledFunction = self
        self._tear: Tear | None = None
        self._norm: torch.Tensor | None = None
        self._calibration, self.calibration_path = calibration, calibration_path
        self._model_times(self)
        self.memory_budget = memory_budget

    def __call__(
        self, *batch: Any, update: bool = True, keep_gradients: bool = False, **named: Any
    ) -> Any:
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
            functions; they share the step's arena and budget.  With a scaler the sums are those of
            scaled gradients, as in eager PyTorch.
        keep_gradients : bool
            True leaves this update's gradients in ``p.grad``, unscaled, as they were before
            clipping, until the next call; all then live at once, as with ``update=False``, and the
            first use compiles the same functions.

        Returns
        -------
        torch.Tensor or tuple
            The loss, without gradient; ``(loss, extras)`` where the model or ``loss_fn`` returned
            more than the loss.

        Raises
        ------
        InputMismatchError, ShapeRangeError
            The batch, the model or the optimizer does not fit the compiled step.
        MemoryBudgetError, OutOfMemoryError
            The shape cannot run inside the budget, or the system has not even that much memory;
            nothing has run.
        NonFiniteLossError
            With `check_finite`, the loss is NaN or infinite; no parameter and no gradient has been
            written.
        StepTornError
            A kernel failed after parameters or gradients had been written, now or at an earlier
            call.
        ReentrantCallError
            The step is running in this thread: a signal handler or a finalizer called it.
        """
        with self._lock, self._alone, deferred_interrupt():
            function = self.accumulation.function_for(update, keep_gradients)
            return self._run(function, batch, named, keep_gradients)

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
            return self.accumulation.function_for(update)._plan(dims, self.memory_budget)

    def memory_report(self) -> MemoryReport:
        """Tell what the last call used, counted while it ran."""
        return super().memory_report() if self._last is self else self._last.memory_report()

    def graph_report(self) -> GraphReport | None:
        """Tell what became of the calls with ``cuda_graphs=True``; None without it."""
        return None if self._graphs is None else self._graphs.report()

    def __repr__(self) -> str:
        dims = ", ".join(str(dim) for dim in self.dims) or "fixed shapes"
        budget = "no" if self.memory_budget is None else f"{self.memory_budget:,} bytes"
        return f"TrainingStep({type(self._model).__name__}, {dims}, memory budget: {budget})"

    @property
    def max_grad_norm(self) -> float | None:
        """The bound of the gradients' global norm, which is part of the program."""
        return self._max_grad_norm

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """Global norm of the last step's gradients before clipping; None without max_grad_norm."""
        return self._norm

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The `torch.amp.GradScaler` that the step drives; its ``state_dict`` holds the scale."""
        return None if self._loss_scale is None else self._loss_scale.scaler

    @property
    def skipped_updates(self) -> int:
        """How many updates were left out because a scaled gradient was not finite."""
        return 0 if self._loss_scale is None else self._loss_scale.skipped

    @property
    def model(self) -> torch.nn.Module:
        """The model whose parameters the step updates."""
        return self._model

    @property
    def optimizer(self) -> Any:
        """The optimizer, or a tuple of several; None in a `GradientStep`."""
        return self._optimizer

    @property
    def offload(self) -> tuple[str, ...]:
        """What is kept in the folder of `offload_to`: "activations", "optimizer"; settable.

        With "optimizer" the tensors of the optimizer's state lie in a file there, with or without a
        budget: those of a parameter are in memory while its update runs, and the plan counts them
        then.  They stay the tensors of ``optimizer.state``, for ``state_dict()`` and whatever else
        reads them between steps.

        Set one of them or several.  Raises `InputMismatchError`: something else is named, there is
        no folder, or no optimizer; `OffloadError`: the folder cannot be used.
        """
        return self._offload

    @offload.setter
    def offload(self, value: str | Sequence[str]) -> None:
        names = check_offload(value, self.offload_to, self._optimizer)
        self._set_offload(self.offload_to, names)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put parameters, buffers, optimizer state, counts and scale back when the block ends.

        Sums of gradients are put aside meanwhile: inside there are none.
        """
        with self._lock, without_gradients(self._model), self._binding.states.put_back():
            self._binding.refresh(early=True)
            there = [index for index in self._written if self._binding.is_bound(index)]
            tensors = [self._binding.tensor(index) for index in there]
            rng = None if self._rng is None else self._rng.mark()
            started = self.accumulation.started
            self.accumulation.started = False
            scale = None if self._loss_scale is None else self._loss_scale.mark()
            try:
                with restored(tensors, self._counters):
                    yield
            finally:
                self.accumulation.started = started
                self.accumulation.forget_gradients()
                if self._loss_scale is not None and scale is not None:
                    self._loss_scale.restore(scale)
                if self._rng is not None and rng is not None:
                    self._rng.restore(rng)

    @property
    def calibration(self) -> Calibration | None:
        """What `calibrate` measured, here or before the step was saved; None: nothing."""
        return self._calibration

    @property
    def check_finite(self) -> bool:
        """Whether a loss that is NaN or infinite is an error before anything is written."""
        return self._check_finite

    @check_finite.setter
    def check_finite(self, value: bool) -> None:
        if not isinstance(value, bool | np.bool_):
            raise InputMismatchError(f"check_finite is True or False, not {value!r}.")
        self._check_finite = bool(value)

    def calibrate(self, *batch: Any, repeats: int = 3, **named: Any) -> None:
        """Measure the kernels on a batch, so that plans weigh them by their times on this machine.

        Runs the step ``repeats + 1`` times and puts back what that changed, of which it takes a
        copy meanwhile, outside the budget.  Times at other shapes are modelled from those measured:
        calibrate at a small and at a large shape.  All plans are dropped; results stay the same to
        the last bit.  What was measured is saved with the step and kept beside its compiled program
        in the cache, for this kind of machine.  The functions of accumulation are measured too, if
        they have been used.

        Parameters
        ----------
        *batch, **named
            As for a call.
        repeats : int
            How many runs are timed; the median counts.

        Raises
        ------
        InputMismatchError, ShapeRangeError, MemoryBudgetError, NonFiniteLossError
            As for a call.
        """
        if not hasattr(repeats, "__index__") or repeats < 1:
            raise InputMismatchError(f"calibrate() times at least one run, not {repeats!r}.")
        with self._lock, self._alone, deferred_interrupt(), self.restored():
            calibration = self._calibration or Calibration(machine_name(self._schema.device))
            for function in self._functions():
                run = functools.partial(self._run, function, batch, named)
                for name, measurement in profiled(function._variants, run, repeats):
                    calibration = calibration.adding(name, measurement)
        self._use_calibration(calibration)
        if self.calibration_path is not None:
            write(self.calibration_path, calibration)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compiled step into one file, without weights and optimizer state.

        The file appears whole or not at all, and holds native code for this processor and these
        library versions.  What training goes on from is saved beside it as usual:
        ``model.state_dict()``, ``optimizer.state_dict()`` and, with dropout, `rng_state`.

        Raises
        ------
        ArtefactError
            The batch holds something besides tensors that cannot be written down, or the code was
            not linked yet and there is no C++ compiler.
        """
        with self._lock:
            programs = {"step": saved_step.Program(self._captured, self._executable, self._library)}
            if self.accumulation.programs is not None:
                programs["adding"], programs["updating"] = self.accumulation.programs
            settings = {
                "memory_budget": self.memory_budget,
                "check_finite": self.check_finite,
                "cuda_graphs": self._graphs is not None,
                "max_grad_norm": self._max_grad_norm,
                "calibration": None if self._calibration is None else self._calibration.describe(),
            }
            saved_step.save(path, programs, settings, self._model, self._optimizer)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: Any,
        loss_fn: Callable[..., Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
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
        loss_fn : callable, optional
            The loss function with which the step was compiled, if that reads tensors or values
            besides its arguments, which are then read from this one.
        scaler : torch.amp.GradScaler, optional
            If the step was compiled with one; load its ``state_dict`` to go on with that scale.

        Raises
        ------
        ArtefactError
            The file is damaged, or was made with other versions, for another processor, model or
            optimizer.  Nothing of it has been executed.
        """
        programs, settings = saved_step.load(path, model, optimizer, loss_fn)
        main = programs["step"]
        scaler = check_scaler(scaler)
        if (scaler is not None) != any(spec.kind == "scale" for spec in main.captured.inputs):
            was, now = ("without", "with") if scaler is not None else ("with", "without")
            raise ArtefactError(
                f"{path} was compiled {was} an enabled scaler and is loaded {now} one."
            )
        measured = settings.pop("calibration")
        if measured is not None:
            machine = machine_name(device_of(model))
            measured = usable(Calibration.restore(measured), machine, path)
        kind = GradientStep if optimizer is None else cls
        return kind(
            *(main.captured, main.executable, model, optimizer, main.library),
            calibration=measured,
            scaler=scaler,
            summing=(programs["adding"], programs["updating"]) if "adding" in programs else None,
            **settings,
        )

    def use_calibration(self, saved: Calibration, where: object) -> None:
        """Plan by times that were measured before, unless on another kind of machine."""
        with self._lock:
            found = usable(saved, machine_name(self._schema.device), where)
            if found is not None:
                self._use_calibration(found)

    def _use_calibration(self, calibration: Calibration) -> None:
        self._calibration = calibration
        for function in self._functions():
            self._model_times(function)

    def _model_times(self, function: CompiledFunction) -> None:
        """Plan a function by the measured times of its kernels, if there are any."""
        if self._calibration is not None:
            for session in function._variants.sessions():
                apply_to(session, self._calibration.of(session.metadata.function))

    def _functions(self) -> tuple[CompiledFunction, ...]:
        return (self, *self.accumulation.known())

    def _fits(self, dims: Mapping[str, int], budget: int) -> bool:
        """While gradients wait both kinds of call must fit."""
        function = self.accumulation.function_for(True)
        calls = [function]
        if function is not self:
            calls.append(self.accumulation.function_for(False))
        return all(call._call_fits(dims, budget) for call in calls)

    def _launch(self, tensors: Sequence[torch.Tensor]) -> Any:
        if self._graphs is None:
            return super()._launch(tensors)
        return self._graphs.launch(tensors, self._sizes, self.check_finite, super()._launch)

    def _run(
        self,
        function: CompiledFunction,
        batch: tuple[Any, ...],
        named: dict[str, Any],
        keep_gradients: bool = False,
    ) -> Any:
        self._refuse_torn()
        if not torch.is_grad_enabled():
            raise InputMismatchError(
                "The step is called inside torch.no_grad() or torch.inference_mode(), where eager "
                "PyTorch trains nothing, and would train: call it outside, or the model itself for "
                "a loss."
            )
        self._check_mode()
        tensors, values = function._bind(batch, named)
        for watch in self._watches:
            watch.check()
        self._last = function
        if self._graphs is not None and function is not self:
            self._graphs.note_plain(SUMMED)
        self.accumulation.drop_kept()
        try:
            fill(self._vectors, self._counters, check=self.check_finite)
            if isinstance(function, Summing):
                function.set_check(self.check_finite)
            flat = function._execute(tensors, values)
        except BaseException as error:
            self._withdraw_state(function)
            self._note_failure(function, error)
            raise
        kinds = [out.kind for out in function._returned]
        if "norm" in kinds:
            self._norm = flat[kinds.index("norm")]
        if self.accumulation.note(function, keep_gradients):
            self._finish_update(self._skipped(function, flat, keep_gradients))
        else:
            self._withdraw_state(function)
        mark_loss(flat[0])
        return (flat[0], function._extras(flat)) if function._has_extras else flat[0]

    def _skipped(
        self, function: CompiledFunction, flat: Sequence[torch.Tensor], keep_gradients: bool
    ) -> list[torch.optim.Optimizer]:
        """List the optimizers that have updated nothing; tell the scaler."""
        if self._loss_scale is None:
            return []
        flags = {
            int(out.name): bool(value)  # waits for the step, as GradScaler.step() does
            for out, value in zip(function._returned, flat, strict=True)
            if out.kind == "overflow"
        }
        if keep_gradients and isinstance(function, Summing):
            found = [p.grad for p in function.parameters() if p.grad is not None]
            self._loss_scale.unscale(found)
        self._loss_scale.settle(list(flags.values()))
        return [member for k, member in enumerate(self._members) if flags.get(k)]

    def _finish_update(self, skipped: Sequence[torch.optim.Optimizer]) -> None:
        """Count the update of all optimizers but those."""
        left_out = set(map(id, skipped))
        for counter in self._counters:
            if id(counter.optimizer) in left_out:
                counter.withdraw()
            else:
                counter.advance()
        self._has_updated = True
        # What the wrapper that a learning-rate scheduler puts round optimizer.step would set.
        for member in self._members:
            if id(member) not in left_out:
                setattr(member, "_opt_called", True)  # noqa: B010 - it declares no such name

    def _before_eager_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell a user who calls ``optimizer.step()`` that a call of the step has updated already.

        Raises `InputMismatchError`: gradients that the update used are there still, and would be
        used a second time.
        """
        if not self._has_updated:
            return
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        gradients = [p.grad for p in parameters if p.grad is not None]
        text = (
            f"{type(optimizer).__name__}.step() was called, but the compiled step has made the "
            "update already: leave it out. To update yourself call step(*batch, update=False) "
            "before it, or compile with optimizer=None."
        )
        if self.accumulation.keeps(gradients):
            raise InputMismatchError(f"{text} It would use the gradients kept a second time.")
        if not gradients and not self._has_warned:
            self._has_warned = True
            warnings.warn(text, RelaxDiscWarning, stacklevel=4)

    def _withdraw_state(self, function: CompiledFunction) -> None:
        """Leave no state that PyTorch would not have created yet."""
        if not function._variants.torn:
            for counter in self._counters:
                counter.withdraw()

    def _note_failure(self, function: CompiledFunction, error: BaseException) -> None:
        """Remember what was written, so that a later call knows when it has been loaded again."""
        if not function._variants.torn:
            return
        self._tear = Tear(function)
        raise StepTornError(
            f"The step failed after some tensors had been written ({error}). {self._tear.advice}"
        ) from error

    def _refuse_torn(self) -> None:
        if self._tear is not None:
            self._tear.mend()
            self._tear = None


class GradientStep(Summing, TrainingStep):
    """A step compiled without an optimizer: it adds gradients into ``p.grad``, no more.

    Every call is made with ``update=False``; the update is the caller's own, as in
    ``optimizer.step(); optimizer.zero_grad()``.  The gradients count as resident memory.  The
    parameters are those of `TrainingStep`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.bind_check()

    def plan(self, *, update: bool = False, **dims: int) -> MemoryPlan:
        """Tell the memory and modelled time of a shape: see `TrainingStep.plan`."""
        return super().plan(update=update, **dims)

    def _fits(self, dims: Mapping[str, int], budget: int) -> bool:
        return self._call_fits(dims, budget)
