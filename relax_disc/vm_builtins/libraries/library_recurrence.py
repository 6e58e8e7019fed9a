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

import numpy as np

from relax_disc.vm_builtins.libraries import recurrence_steps
from relax_disc.vm_builtins.libraries.arrays import array_of

recurrence, recurrence_backward = recurrence_steps.library_functions(np.tanh, array_of)
