"""Stop a step whose loss is not finite before it writes a parameter.

The optimizer's kernels read their hyper-parameters from what this function passes on, so whatever
order they are scheduled in, they run after it.
"""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi

from relax_disc.errors import NonFiniteLossError

GUARD = "relax_disc.guard_finite"


def guard_finite(hyper: Any, loss: Any, passed: Any) -> None:
    """Copy the hyper-parameters; with their last entry set, refuse a loss that is not finite.

    Parameters
    ----------
    hyper, passed : tensor
        Vector of hyper-parameters, and where to copy it.
    loss : tensor
        One number.

    Raises
    ------
    NonFiniteLossError
        The check is on and the loss is NaN or infinite.
    """
    import torch  # a second's work, which whoever calls this has done

    source = torch.from_dlpack(hyper)
    torch.from_dlpack(passed).copy_(source)
    value = float(torch.from_dlpack(loss)) if bool(source[-1]) else 0.0
    if not math.isfinite(value):
        raise NonFiniteLossError(
            f"The loss of this batch is {value}; no parameter has been written. Look at the batch "
            "and the learning rate, or set step.check_finite = False to go on regardless."
        )


tvm_ffi.register_error(NonFiniteLossError)
tvm_ffi.register_global_func(GUARD, guard_finite, override=True)
