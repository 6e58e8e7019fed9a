"""The split search of `schedule_split` in C++: the same order, many times faster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from relax_disc.analysis.schedule.problem import ScheduleProblem


@functools.cache
def native_split() -> Callable[..., Any] | None:
    """Return the C++ function, or None where there is no native library."""
    from relax_disc.vm_builtins import native

    if native.load() is None:
        return None
    import tvm_ffi

    return tvm_ffi.get_global_func("relax_disc.schedule.split", allow_missing=True)


def split_natively(
    function: Callable[..., Any],
    problem: ScheduleProblem,
    starts: Sequence[Sequence[int]],
    target: int,
    work: int,
    seconds: float,
) -> tuple[list[int], int, int, int, bool]:
    """Run the C++ search; arguments and results are those of `schedule_split.split_search`.

    Returns
    -------
    tuple
        (order, peak, bound, work used, whether the time limit struck).
    """
    order = np.zeros(problem.ops, dtype=np.int32)
    facts = np.zeros(4, dtype=np.int64)
    pair = [list(chain.from_iterable(pairs)) for pairs in problem.pair]
    function(
        *_rows(problem.touch),
        *_rows(problem.need),
        *_rows(pair),
        np.array(problem.ready, dtype=np.int8),
        np.array(problem.stays, dtype=np.int8),
        np.array(problem.size, dtype=np.int64),
        np.array(problem.extra, dtype=np.int64),
        np.array(problem.base, dtype=np.int64),
        np.array(starts, dtype=np.int32).reshape(-1),
        target,
        work,
        seconds,
        order,
        facts,
    )
    peak, bound, used, timed_out = facts.tolist()
    return order.tolist(), peak, bound, used, bool(timed_out)


def _rows(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return where each row begins, and all items one behind the other."""
    begin = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=begin[1:])
    return begin, np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(begin[-1]))
