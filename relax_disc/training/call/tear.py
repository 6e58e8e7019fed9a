"""Remember a call that failed half-way, until what it had written is loaded again or cleared."""

from __future__ import annotations

import torch

from relax_disc.errors import StepTornError
from relax_disc.training.compiled_function import CompiledFunction


class Tear:
    """What a torn call may have written, as it was when the call failed."""

    def __init__(self, function: CompiledFunction) -> None:
        self._function = function
        self._written: list[tuple[int, torch.Tensor, int]] = []
        for index in function._written:
            tensor = function._binding.tensor(index)
            self._written.append((index, tensor, tensor._version))

    @property
    def advice(self) -> str:
        """What the user must do."""
        inputs = self._function._captured.inputs
        kinds = {inputs[index].kind for index, *_ in self._written}
        todo = []
        if "gradient" in kinds:
            todo.append("clear the gradients (`model.zero_grad()`)")
        if kinds - {"gradient"}:
            todo.append("load a saved state into the model and the optimizer")
        text = " and ".join(todo)
        return f"{text[:1].upper()}{text[1:]} before the next step."

    def mend(self) -> None:
        """Forget the failure if all that may have been written is new.

        Raises `StepTornError`: names a tensor that is as the failure left it.
        """
        for index, old, version in self._written:
            now = self._function._binding.look(index)
            if now is not None and now is old and now._version == version:
                name = self._function._captured.inputs[index].name
                raise StepTornError(
                    f"An earlier step failed half-way, and {name} has not been loaded again or "
                    f"cleared since. {self.advice}"
                )
        self._function._variants.clear_torn()
