"""Stop a step before it writes: an index is out of range, a value not finite, a check fails.

The run time orders every kernel that overwrites a tensor of the caller after this one (see
`analysis/program/storage.py`), and what it reads is computed before.  All that it looks at is
fetched in one transfer; where there is nothing to look at, no device is waited for.
"""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi

from relax_disc.errors import (
    BranchError,
    IndexRangeError,
    ModelCheckError,
    NonFiniteLossError,
    RelaxDiscError,
)
from relax_disc.vm_builtins.capturing import is_capturing, refuse_capture

GUARD = "relax_disc.guard"
"""What programs call: native code (`src/runtime/guard.cc`), which asks `BY_TORCH` if need be."""

BY_TORCH = "relax_disc.guard_by_torch"

BRANCH = "The branch on data at "
"""How the message of a check begins that a branch goes the way that was compiled."""


def guard(hyper: Any, loss: Any, count: int, *rest: Any) -> None:
    """Copy the hyper-parameters, unless something forbids the step.

    ``hyper``: vector of hyper-parameters; with its last entry set, `loss` and the buffers must be
    finite. ``*rest``: new values of ``count`` buffers with a name each; then for each checked index
    its flag (see `frontend.index_checks`), the least and the greatest value allowed, and where it
    stands in the model; last, where to copy `hyper`.  Where no value is allowed, the least above
    the greatest, the flag is that of a check of the model's own, and its message stands there.

    Raises `IndexRangeError`, `ModelCheckError` or `BranchError`: a flag is set. Raises
    `NonFiniteLossError`: the check is on, and the loss or a buffer is NaN or infinite.
    """
    import torch  # a second's work, which whoever calls this has done

    passed, buffers, flags = rest[-1], rest[: 2 * count], rest[2 * count : -1]
    source = torch.from_dlpack(hyper)
    torch.from_dlpack(passed).copy_(source, non_blocking=True)
    wanted = [torch.from_dlpack(flag) for flag in flags[::4]]
    # The vector lies on the host, but for a graph, which is captured without the check.
    must_be_finite = not is_capturing() and bool(source[-1])
    if must_be_finite:
        values = [torch.from_dlpack(tensor) for tensor in (loss, *buffers[::2])]
        # A sum of finite numbers is finite in float64, unless they are far from any use.
        wanted += [value.sum(dtype=torch.float64) for value in values]
    if not wanted:
        return
    refuse_capture("checks of the model wait for values of the device")
    numbers = torch.cat([value.reshape(1).double() for value in wanted]).tolist()
    for k, flag in enumerate(numbers[: len(flags) // 4]):
        if flag > 0:
            raise _refusal(int(flag), *flags[4 * k + 1 : 4 * k + 4])
    names = ["loss of this batch", *(f"new value of the buffer {name}" for name in buffers[1::2])]
    for value, name in zip(numbers[len(flags) // 4 :], names, strict=must_be_finite):
        if not math.isfinite(value):
            raise NonFiniteLossError(
                f"The {name} is {value}; nothing has been written. Look at the batch and "
                "the learning rate, or set step.check_finite = False to go on regardless."
            )


def _refusal(flag: int, lower: int, upper: int, where: str) -> RelaxDiscError:
    """Make the error of a flag: twice the distance from the range, odd below it."""
    if lower > upper:
        kind = BranchError if where.startswith(BRANCH) else ModelCheckError
        return kind(f"{where} Nothing has been written.")
    distance, below = divmod(flag, 2)
    value = lower - distance if below else upper + distance
    return IndexRangeError(
        f"{where}: an index is {value}; indices must be in {lower} .. {upper}. Nothing has been "
        "written."
    )


for _error in (BranchError, IndexRangeError, ModelCheckError, NonFiniteLossError):
    tvm_ffi.register_error(_error)
tvm_ffi.register_global_func(BY_TORCH, guard, override=True)
