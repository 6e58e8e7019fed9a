"""From a PyTorch model to one Relax function with symbolic shapes.

:func:`capture_step` captures forward, gradients and optimizer update; :func:`capture_forward` the
forward pass alone.  The function ``main`` of the module carries the attributes

``relax_disc.dims``
    ``{name: [lower, upper, divisor]}``, an upper bound of -1 for none.
``relax_disc.inplace_pairs``
    ``[[output, input], ...]``: the output is the new value of the input.
``relax_disc.param_kinds``
    The kind of each parameter, see :class:`InputSpec`.

and every binding has a span with the line of the model that it stems from.
"""

from relax_disc.frontend.batch_spec import BatchSpec
from relax_disc.frontend.capture import capture_forward, capture_step
from relax_disc.frontend.optimizers import (
    ADAM_HYPER,
    SGD_HYPER,
    hyper_values,
    required_state,
    state_step,
    update_rule,
)
from relax_disc.frontend.spec import (
    CapturedStep,
    DimSpec,
    InputSpec,
    OutputSpec,
    UpdateGroup,
)

__all__ = [
    "ADAM_HYPER",
    "SGD_HYPER",
    "BatchSpec",
    "CapturedStep",
    "DimSpec",
    "InputSpec",
    "OutputSpec",
    "UpdateGroup",
    "capture_forward",
    "capture_step",
    "hyper_values",
    "required_state",
    "state_step",
    "update_rule",
]
