"""Inline the regions of ``torch.utils.checkpoint``: what is computed again is the plan's choice.

A model that marks regions for recomputation (``gradient_checkpointing_enable()`` of Hugging Face)
asks for what every compiled step does anyway, with the whole step in view.  Left as it is, the
reentrant form would run its region without gradients while the step is exported, and the region's
parameters would silently not train.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint


class _Inlined:
    """Stands for ``torch.utils.checkpoint.CheckpointFunction``, the reentrant form."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run the region like any other code."""
        return function(*args)


def _inlined(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Stand for the form without re-entrance: what it does before and after the region."""
    yield


@contextlib.contextmanager
def inlined_checkpoints() -> Iterator[None]:
    """Make ``torch.utils.checkpoint.checkpoint`` run its function like any other code.

    Models hold on to ``checkpoint`` itself, so what it calls is replaced.
    """
    module: Any = checkpoint
    before = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    module.CheckpointFunction = _Inlined
    module._checkpoint_without_reentrant_generator = _inlined
    try:
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = before
