"""Optimizer hyper-parameters and step counts: read before a step, raised after it.

PyTorch keeps the count of steps per parameter in ``optimizer.state[p]["step"]``.  The counts stay
there; the vectors of hyper-parameters that the kernels read are made from them in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.optimizer.states import hyper_values
from relax_disc.frontend.spec import UpdateGroup


class StepCounters:
    """The step counts of one update group, cached while nobody else writes them.

    State that PyTorch would create at the first step is found missing here, before the binding
    creates it, so this is constructed first.

    Parameters
    ----------
    group : UpdateGroup
        Parameters that share hyper-parameters and a count.
    model : torch.nn.Module
        Owner of the parameters.
    optimizer : torch.optim.Optimizer
        Owner of counts and hyper-parameters.
    """

    def __init__(
        self, group: UpdateGroup, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._group, self._optimizer = group, optimizer
        self._counted = not isinstance(optimizer, torch.optim.SGD)
        self._parameters = [model.get_parameter(name) for name in group.targets]
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._step, self._first = 0, False
        self._read()

    def values(self, check: bool) -> list[float]:
        """Return the hyper-parameter vector of the coming step.

        Parameters
        ----------
        check : bool
            Stop before the first update when the loss is not finite.

        Raises
        ------
        InputMismatchError
            The parameters' counts differ now, though they agreed when the step was compiled.
        """
        self._read()
        settings = self._optimizer.param_groups[self._group.param_group]
        return hyper_values(
            self._optimizer, settings, self._step + 1, first=self._first, check=check
        )

    def advance(self) -> None:
        """Count a finished step."""
        self._step, self._first = self._step + 1, False
        if self._tensors:
            with torch.no_grad():
                torch._foreach_add_(self._tensors, 1)  # pyright: ignore[reportPrivateImportUsage]
            self._versions = [tensor._version for tensor in self._tensors]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The counts that PyTorch keeps."""
        self._read()
        return tuple(self._tensors)

    def mark(self) -> tuple[int, bool]:
        """Return what `restore` needs besides the tensors' values."""
        return self._step, self._first

    def restore(self, mark: tuple[int, bool]) -> None:
        """Go back to a mark, once the tensors have their values of then."""
        self._step, self._first = mark
        self._versions = [tensor._version for tensor in self._tensors]

    def forget_new_momentum(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Remove momentum buffers of a model's optimizer that PyTorch has not filled yet."""
        if self._first:
            for name in self._group.targets:
                optimizer.state[model.get_parameter(name)].pop("momentum_buffer", None)

    def _read(self) -> None:
        state = self._optimizer.state
        if not self._counted:
            empty: dict[str, torch.Tensor] = {}  # reading state[p] would create it
            self._first |= any(
                state.get(p, empty).get("momentum_buffer") is None for p in self._parameters
            )
            return
        tensors = [state[parameter].get("step") for parameter in self._parameters]
        same = len(tensors) == len(self._tensors) and all(
            new is old and new._version == version
            for new, old, version in zip(tensors, self._tensors, self._versions, strict=True)
        )
        if same:
            return
        found: list[torch.Tensor] = []
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                tensor = torch.tensor(float(tensor or 0.0), dtype=torch.float32)
                state[parameter]["step"] = tensor
            found.append(tensor)
        counts = {int(tensor) for tensor in found}
        if len(counts) > 1:
            raise InputMismatchError(
                f"The optimizer's step counts of {self._group.targets[0]} and others of its "
                f"parameter group differ ({sorted(counts)[:4]}), but they agreed when the step was "
                "compiled; compile the step again."
            )
        self._step = counts.pop()
        self._tensors, self._versions = found, [tensor._version for tensor in found]


def fill(vectors: Sequence[torch.Tensor], counters: Sequence[StepCounters], *, check: bool) -> None:
    """Write every group's hyper-parameters into the vectors that the kernels read."""
    for vector, counter in zip(vectors, counters, strict=True):
        vector.copy_(torch.tensor(counter.values(check), dtype=torch.float64))
