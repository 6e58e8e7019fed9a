"""One compiled training step: a callable that updates PyTorch's own model and optimizer.

``loss = step(*batch)`` checks the batch, binds what PyTorch has replaced since the last call, reads
the hyper-parameters, runs the compiled function and counts the step.  Everything that can be
refused is refused before the first kernel, when nothing has changed yet.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
import tvm
from tvm import relax

from relax_disc.analysis.symbolic_dim import SymbolicDim
from relax_disc.bytes_text import parse_bytes
from relax_disc.errors import InputMismatchError, ShapeRangeError, StepTornError
from relax_disc.frontend.spec import CapturedStep
from relax_disc.training.batch import BatchSchema
from relax_disc.training.binding import Binding, as_runtime
from relax_disc.training.counters import StepCounters, fill
from relax_disc.training.interrupt import deferred_interrupt
from relax_disc.training.memory_plan import MemoryPlan, largest_that_fits
from relax_disc.vm_builtins.session import Session


class TrainingStep:
    """A compiled step; made by `relax_disc.compile`.

    Parameters
    ----------
    captured : CapturedStep
        What was captured: inputs, outputs, dims, update groups.
    executable : tvm.relax.VMExecutable
        The program, for every shape.
    schema : BatchSchema
        What a batch must look like.
    model : torch.nn.Module
        Its parameters and buffers are updated in place.
    optimizer : torch.optim.Optimizer or None
        Its state is updated in place; None makes a forward function.
    """

    def __init__(
        self,
        captured: CapturedStep,
        executable: relax.VMExecutable,
        schema: BatchSchema,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._captured, self._executable, self._schema = captured, executable, schema
        self._model, self._optimizer = model, optimizer
        self._training = {name: module.training for name, module in model.named_modules()}
        device = tvm.runtime.device(schema.device.type, schema.device.index or 0)
        self._machine = relax.VirtualMachine(executable, device)
        self._function = self._machine["main"]
        self.session = Session.of(self._machine, "main")
        self._counters = [
            StepCounters(group, model, optimizer)
            for group in (captured.update_groups if optimizer is not None else ())
        ]
        self._binding = Binding(captured.inputs, model, optimizer, dict(captured.constants))
        self._arguments = self._binding.arguments
        self._batch_places = [
            index for index, spec in enumerate(captured.inputs) if spec.kind == "batch"
        ]
        self._shape_place = next(
            (index for index, spec in enumerate(captured.inputs) if spec.kind == "shape"), None
        )
        self._vectors = self._bind_hyper()
        replaced = {out.replaces for out in captured.outputs if out.replaces is not None}
        self._written = sorted(replaced)
        self._lock = threading.RLock()
        self._torn_versions: list[tuple[torch.Tensor, int]] | None = None
        self._last_norm: torch.Tensor | None = None

    def __call__(self, *batch: Any, update: bool = True, **named: Any) -> torch.Tensor:
        """Run one step and return the loss, a tensor without gradient.

        Raises
        ------
        InputMismatchError, ShapeRangeError
            The batch, the model or the optimizer does not fit the compiled step.
        MemoryBudgetError
            The shape cannot run inside the budget; nothing has run.
        StepTornError
            A kernel failed after parameters had been written, now or at an earlier call.
        """
        if not update:
            raise InputMismatchError(
                "update=False (gradient accumulation) is not supported by this version; pass the "
                "whole batch at once under a memory_budget."
            )
        with self._lock, deferred_interrupt():
            return self._run(batch, named)

    @property
    def dims(self) -> tuple[SymbolicDim, ...]:
        """The symbolic dims, with their ranges."""
        return self._schema.dims

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """Global norm of the last step's gradients before clipping; None without clipping."""
        return self._last_norm

    @property
    def memory_budget(self) -> int | None:
        """Budget in bytes for all device memory of the step; None is no limit."""
        return self.session.memory_budget

    @memory_budget.setter
    def memory_budget(self, value: int | str | None) -> None:
        with self._lock:
            self.session.memory_budget = None if value is None else parse_bytes(value)

    def plan(self, **dims: int) -> MemoryPlan:
        """Tell the memory and modelled time of a shape under the present budget; runs nothing.

        Parameters
        ----------
        **dims : int
            A size for every dim, by its name.

        Raises
        ------
        ShapeRangeError
            A dim is missing, unknown or out of its range.
        """
        return self._plan(dims, self.memory_budget)

    def largest(
        self, dim: str, *, memory_budget: int | str | None = None, **other_dims: int
    ) -> int:
        """Return the largest size of one dim that fits the budget, the others given.

        Parameters
        ----------
        dim : str
            Name of the dim to maximise; it must have an upper bound.
        memory_budget : int, str or None
            Budget to use instead of the step's own.
        **other_dims : int
            Sizes of all other dims.

        Returns
        -------
        int
            The size, or 0 where none fits.
        """
        budget = self.memory_budget if memory_budget is None else parse_bytes(memory_budget)
        found = next((d for d in self.dims if d.name == dim), None)
        if found is None or found.last is None:
            names = ", ".join(d.name for d in self.dims)
            raise ShapeRangeError(f"largest() needs a bounded dim of {names}; got {dim!r}.")
        if budget is None:
            return found.last
        return largest_that_fits(
            lambda size: self._plan({**other_dims, dim: size}, budget).fits,
            found.first,
            found.last,
            found.divisor,
        )

    def _plan(self, dims: Mapping[str, int], budget: int | None) -> MemoryPlan:
        values = _ordered(self.dims, dims)
        facts = self.session.plan(values, budget)
        names = self.session.kernel_names
        by_kind = self._binding.bytes_by_kind
        return MemoryPlan(
            shape=dict(dims),
            budget_bytes=budget,
            fits=facts.feasible,
            peak_bytes=facts.peak_bytes,
            resident_bytes=facts.resident_bytes,
            state_bytes=sum(by_kind.get(k, 0) for k in ("parameter", "buffer", "state")),
            arena_bytes=facts.arena_bytes,
            live_peak_bytes=facts.live_peak_bytes,
            escaping_bytes=facts.escaping_bytes,
            workspace_bytes=0,
            time_ratio=facts.time_ratio,
            evicted=tuple(names[kernel] for kernel in facts.recomputed),
            least_bytes=facts.least_bytes,
        )

    def _run(self, batch: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
        self._refuse_torn()
        self._check_mode()
        tensors, values = self._schema.bind(batch, named)
        fill(self._vectors, self._counters)
        self._binding.refresh()
        arguments = self._arguments
        for place, tensor in zip(self._batch_places, tensors, strict=True):
            arguments[place] = _batch_argument(tensor)
        if self._shape_place is not None:
            arguments[self._shape_place] = tvm.runtime.ShapeTuple(
                [values[dim.name] for dim in self.dims]
            )
        try:
            outputs = self._function(*arguments)
        except Exception as error:
            self._note_failure(error)
            raise
        finally:
            for place in self._batch_places:
                arguments[place] = None
        self._finish()
        return self._results(outputs)

    def _results(self, outputs: Any) -> torch.Tensor:
        flat = outputs if len(self._captured.outputs) - len(self._written) > 1 else [outputs]
        loss = torch.from_dlpack(flat[0])
        kinds = [out.kind for out in self._captured.outputs if out.replaces is None]
        if "norm" in kinds:
            self._last_norm = torch.from_dlpack(flat[kinds.index("norm")])
        return loss

    def _finish(self) -> None:
        """Count the step and tell autograd that the written tensors changed."""
        torch.autograd.graph.increment_version([self._binding.tensor(i) for i in self._written])
        for counter in self._counters:
            counter.advance()

    def _note_failure(self, error: Exception) -> None:
        if not self.session.torn:
            return
        self._torn_versions = [
            (tensor, tensor._version) for tensor in map(self._binding.tensor, self._written)
        ]
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
                    "An earlier step failed half-way and "
                    f"{self._captured.inputs[index].target} has not been loaded again since. Load "
                    "a saved state into the model and the optimizer before the next step."
                )
        self._torn_versions = None
        self.session.clear_torn()

    def _check_mode(self) -> None:
        for name, module in self._model.named_modules():
            if module.training != self._training.get(name, module.training):
                mode = "train" if self._training[name] else "eval"
                raise InputMismatchError(
                    f"Module {name or 'model'!r} was compiled in {mode}() mode and is in the other "
                    f"one now; call `.{mode}()` or compile another step."
                )

    def _bind_hyper(self) -> list[torch.Tensor]:
        vectors = []
        for group in self._captured.update_groups:
            spec = self._captured.inputs[group.hyper_input]
            (length,) = spec.shape
            vector = torch.zeros(int(length), dtype=getattr(torch, spec.dtype))
            vectors.append(vector)
            self._arguments[group.hyper_input] = as_runtime(vector, spec.name)
        return vectors


def _batch_argument(tensor: torch.Tensor) -> tvm.runtime.Tensor:
    """Share a batch tensor with the program; only one with odd strides or address is copied."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.numel() and tensor.data_ptr() % 64:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tvm.runtime.from_dlpack(tensor)


def _ordered(known: tuple[SymbolicDim, ...], given: Mapping[str, int]) -> list[int]:
    """Put the sizes of all dims in order.

    Raises
    ------
    ShapeRangeError
        A dim is missing, unknown or out of its range.
    """
    names = [dim.name for dim in known]
    if set(given) != set(names):
        raise ShapeRangeError(
            f"Give one size for each of the dims {', '.join(names)}; got {', '.join(given)}."
        )
    for dim in known:
        if given[dim.name] not in dim:
            raise ShapeRangeError(f"{dim.name}={given[dim.name]}; allowed is {dim}.")
    return [int(given[name]) for name in names]
