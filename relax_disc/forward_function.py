"""A compiled forward pass: inference at every shape from one compilation."""

from __future__ import annotations

from typing import Any

from relax_disc.training.compiled_function import CompiledFunction


class ForwardFunction(CompiledFunction):
    """A compiled forward pass; made by `relax_disc.compile_forward`.

    Buffers that the forward pass changes (in ``train()`` mode) are updated in place.
    """

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the model and return its outputs, without gradients, in the model's structure.

        Raises `InputMismatchError` or `ShapeRangeError`: the arguments or the model do not fit what
        was compiled. Raises `MemoryBudgetError`: the shape cannot run inside the budget; nothing
        has run.
        """
        with self._lock:
            return self._extras(self.run(args, named))
