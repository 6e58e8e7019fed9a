"""Scratch memory of a library's kernel, by a formula that only the native library knows.

It follows from the block sizes of the kernels on the processor at hand and from the number of
threads, so that it is no polynomial; it can be evaluated, and compared where it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi

from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.vm_builtins import runtime


@dataclass(frozen=True, slots=True)
class LibraryWorkspace:
    """Bytes of a kernel's workspace on the present number of threads.

    ``formula``: of the native library: `kernels/workspace.h`. ``numbers``: the formula's
    parameters.
    """

    formula: str
    numbers: tuple[SymbolicExpr, ...]

    def evaluate(self, sizes: Mapping[str, int | np.ndarray]) -> Any:
        """Return the bytes where the dims have these sizes: an int, or an array of int64."""
        numbers = [
            number.as_int() if number.is_constant else number.evaluate(sizes)
            for number in self.numbers
        ]
        threads = int(runtime.function("relax_disc.cpu.num_threads")())
        rows = np.broadcast_arrays(*numbers)
        if rows[0].ndim == 0:
            return _bytes(self.formula, tuple(map(int, rows)), threads)
        columns = np.stack(rows, axis=-1).tolist()
        found = [_bytes(self.formula, tuple(row), threads) for row in columns]
        return np.array(found, dtype=np.int64)


@functools.lru_cache(maxsize=1 << 16)  # orders are judged at the same points again and again
def _bytes(formula: str, numbers: tuple[int, ...], threads: int) -> int:
    del threads  # the present ones: what is known is known for as many
    return int(runtime.function("relax_disc.cpu.workspace_bytes")(formula, tvm_ffi.Shape(numbers)))
