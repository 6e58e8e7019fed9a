"""From a PyTorch model to one Relax function with symbolic shapes.

:func:`capture_step` captures forward, gradients and optimizer update; :func:`capture_forward` the
forward pass alone.
The function, ``main`` unless the result says otherwise, carries the attributes

``relax_disc.dims``
    ``{name: [lower, upper, divisor]}``, an upper bound of -1 for none.
``relax_disc.inplace_pairs``
    ``[[output, input], ...]``: the output is the new value of the input.
``relax_disc.param_kinds``
    The kind of each parameter, see :class:`InputSpec`.
``relax_disc.counted``
    Dims whose sizes the function finds out, by name, with the least that is allowed, 0 or 1; a call
    enters them with their bounds.
``relax_disc.second_half``
    Of a function in two halves how many of its last parameters are given late, and how many of its
    last results are made of those: see :mod:`relax_disc.transform.memory.plan_arena`.

and every binding has a span with the line of the model that it stems from.
"""

from relax_disc.frontend.capture.batch_spec import BatchSpec
from relax_disc.frontend.capture.step import (
    ExportedStep,
    capture_forward,
    capture_halves,
    capture_step,
    export_step,
)
from relax_disc.frontend.optimizer.programs import programs_of
from relax_disc.frontend.spec import (
    CapturedStep,
    CountedDim,
    DimSpec,
    InputSpec,
    OutputSpec,
    UpdateGroup,
)

__all__ = [
    "BatchSpec",
    "CapturedStep",
    "CountedDim",
    "DimSpec",
    "ExportedStep",
    "InputSpec",
    "OutputSpec",
    "UpdateGroup",
    "capture_forward",
    "capture_halves",
    "capture_step",
    "export_step",
    "programs_of",
]
