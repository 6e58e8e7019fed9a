"""Add gradients of several batches into ``p.grad``, and update from their sum.

A second program, compiled at the first use from the same model and batch, returns the gradients;
they are added into PyTorch's own ``p.grad``.  The update from the sum is PyTorch's own optimizer:
its result is what eager accumulation gives, and it happens once for many batches.

Limits: the gradients of one batch are all alive at the end of the program, and count in its peak;
what PyTorch's optimizer allocates while it updates does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relax_disc.errors import MemoryBudgetError, NonFiniteLossError
from relax_disc.training.compiled_function import CompiledFunction


class GradientFunction(CompiledFunction):
    """Forward and gradients without an update; calls return the outputs that replace nothing."""

    def add_gradients(
        self,
        args: Sequence[Any],
        named: Mapping[str, Any],
        *,
        budget: int | None,
        held: int,
        check: bool,
    ) -> tuple[torch.Tensor, Any]:
        """Run a batch and add its gradients into ``p.grad``; return the loss and the extras.

        Parameters
        ----------
        args, named
            The batch.
        budget : int or None
            Bytes for all device memory of the call.
        held : int
            Bytes that the program does not see: optimizer state.
        check : bool
            Refuse a loss that is not finite.

        Raises
        ------
        InputMismatchError, ShapeRangeError
            The batch or the model does not fit.
        MemoryBudgetError
            The shape cannot run inside the budget; nothing has been added.
        NonFiniteLossError
            With ``check``, the loss is NaN or infinite; nothing has been added.
        """
        parameters = self.parameters()
        persistent = held + sum(p.numel() * p.element_size() for p in parameters)
        if budget is not None and budget <= persistent:
            raise MemoryBudgetError(
                f"Gradients and optimizer state alone take {persistent} bytes, the budget is "
                f"{budget}; raise it above that.",
                persistent,
                persistent,
            )
        self.memory_budget = None if budget is None else budget - persistent
        flat = self.run(args, named)
        if check and not torch.isfinite(flat[0]):
            raise NonFiniteLossError(f"The loss is {flat[0].item()}; no gradient has been added.")
        gradients = [
            t for t, out in zip(flat, self._returned, strict=True) if out.kind == "gradient"
        ]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad += gradient
        return flat[0], self._extras(flat)

    def parameters(self) -> list[torch.nn.Parameter]:
        """List the parameters that get gradients, in the order of the program."""
        return [
            self._model.get_parameter(out.name)
            for out in self._captured.outputs
            if out.kind == "gradient"
        ]
