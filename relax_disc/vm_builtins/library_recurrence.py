"""Numpy twins of the native recurrent layers.

================================== ==============================================================
`relax_disc.cpu.recurrence`          projected, state, weight, bias, kind, batch_first, reverse,
                                     out, last, reserve
`relax_disc.cpu.recurrence_backward` grad_out, grad_last, state, weight, out, reserve, kind,
                                     batch_first, reverse, gradients, grad_state
================================== ==============================================================

`kind` is the position of a name in `relax_disc.recurrence_kinds.KINDS`; shapes: `recurrence_steps`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_disc.recurrence_kinds import KINDS
from relax_disc.vm_builtins import recurrence_steps
from relax_disc.vm_builtins.library_arrays import array_of

_NAMES = tuple(KINDS)


def recurrence(
    projected: Any,
    state: Any,
    weight: Any,
    bias: Any,
    kind: int,
    batch_first: int,
    reverse: int,
    out: Any,
    last: Any,
    reserve: Any,
) -> None:
    """Run a recurrent layer in one direction over projected inputs."""
    recurrence_steps.forward(
        np.tanh,
        array_of(projected),
        array_of(state),
        array_of(weight),
        array_of(bias),
        _NAMES[kind],
        bool(batch_first),
        bool(reverse),
        array_of(out),
        array_of(last),
        array_of(reserve),
    )


def recurrence_backward(
    grad_out: Any,
    grad_last: Any,
    state: Any,
    weight: Any,
    out: Any,
    reserve: Any,
    kind: int,
    batch_first: int,
    reverse: int,
    gradients: Any,
    grad_state: Any,
) -> None:
    """Run the gradient of a recurrent layer."""
    recurrence_steps.backward(
        np.tanh,
        array_of(grad_out),
        array_of(grad_last),
        array_of(state),
        array_of(weight),
        array_of(out),
        array_of(reserve),
        _NAMES[kind],
        bool(batch_first),
        bool(reverse),
        array_of(gradients),
        array_of(grad_state),
    )
