"""Sum gradients over batches into ``p.grad``, and update from the sum: two functions of a step.

They are compiled at their first use, from the same model and batch, into one module.  One adds a
batch's gradients in place; the other adds those of the last batch, clips and updates.  Both work in
the step's own arena, under its budget, which counts the sums as memory that is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relax_disc.training.compiled_function import CompiledFunction, bind_vector
from relax_disc.training.saved_step import Program


class SummingFunction(CompiledFunction):
    """A function that reads and writes ``p.grad``; its tensors are bound while they exist.

    Parameters
    ----------
    program : Program
        What was captured, with its code.
    sibling : CompiledFunction
        The function whose model, arena, budget and random state it shares.
    optimizer : torch.optim.Optimizer
        Owner of the state.
    """

    def __init__(
        self, program: Program, sibling: CompiledFunction, optimizer: torch.optim.Optimizer
    ) -> None:
        captured = program.captured
        super().__init__(
            captured, program.executable, program.schema, sibling._model, optimizer, sibling
        )
        self._adding = [
            bind_vector(self._binding, index, int(spec.shape[0]), spec.dtype)
            for index, spec in enumerate(captured.inputs)
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
            vector.copy_(torch.tensor([1.0, float(check)]))

    def forget_gradients(self) -> None:
        """Let go of the sums' memory."""
        self._binding.release_gradients()

    def _execute(self, tensors: Sequence[torch.Tensor], values: Mapping[str, int]) -> list[Any]:
        """Run with sums that begin at zero where there are none; a refusal leaves none behind."""
        missing = [p for p in self.parameters() if p.grad is None]
        if missing:
            # Before their memory is taken: what does not fit must not be there for a moment.
            self._session.check_budget([values[name] for name in self._session.metadata.dims])
        try:
            for parameter in missing:
                parameter.grad = torch.zeros_like(
                    parameter, memory_format=torch.contiguous_format, requires_grad=False
                )
            return super()._execute(tensors, values)
        except Exception:
            if not self._session.torn:
                for parameter in missing:
                    parameter.grad = None
                if missing:
                    self.forget_gradients()
            raise


class Accumulation:
    """The pair of functions.

    Parameters
    ----------
    programs : tuple of Program
        That which adds, and that which updates, of one executable.
    step : CompiledFunction
        The plain step.
    optimizer : torch.optim.Optimizer
        Owner of the state.
    vectors : sequence of torch.Tensor
        Hyper-parameters of the update groups, which all functions read.

    Attributes
    ----------
    adding, updating : SummingFunction
    programs : tuple of Program
        As given.
    """

    def __init__(
        self,
        programs: tuple[Program, Program],
        step: CompiledFunction,
        optimizer: torch.optim.Optimizer,
        vectors: Sequence[torch.Tensor],
    ) -> None:
        self.programs = programs
        self.adding = SummingFunction(programs[0], step, optimizer)
        self.updating = SummingFunction(programs[1], self.adding, optimizer)
        for function in (self.adding, self.updating):
            function.bind_hyper_parameters(vectors)

    def has_sums(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self.adding.parameters())

    def clear(self) -> None:
        """Drop the sums, like ``zero_grad()``."""
        for parameter in self.adding.parameters():
            parameter.grad = None
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Let go of the sums' memory, which their owner has dropped or put aside."""
        self.adding.forget_gradients()
        self.updating.forget_gradients()
