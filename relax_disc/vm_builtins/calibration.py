"""Model the time of every kernel by what was measured of it, at some shapes, for all shapes.

A kernel's work is ``max(flops / flops_per_ns, bytes / bytes_per_ns)`` at the shape of a call.  Its
time is modelled as ``factor * work + fixed``, both at least zero, that come closest to the measured
times by relative error.  One measured shape scales the uncalibrated model.

Limits: kernels that pass from arithmetic to memory traffic as they grow are fitted by one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from relax_disc.vm_builtins.session import Session


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of a function's kernels at one shape."""

    dims: tuple[int, ...]  # the shape, as `PlanMetadata.dims` counts
    times_ns: tuple[float, ...]  # of one execution of each kernel
    threads: int = field(default_factory=torch.get_num_threads)  # how many ran it


def measured(session: Session) -> Measurement:
    """Return what the calls inside the last `Session.profile` measured; all of one shape.

    Raises `ValueError`: no call was profiled.
    """
    times = session.kernel_times()
    if not all(runs for runs, _ in times):
        raise ValueError("A measurement needs a call inside Session.profile() first.")
    return Measurement(session.report().dims, tuple(time / runs for runs, time in times))


def apply_measurements(session: Session, measurements: Sequence[Measurement]) -> None:
    """Model kernels' times by what was measured on as many threads, else by the machine's figures.

    Drops all plans.

    Raises `ValueError`: a measurement is of another function: it has another number of kernels or
    dims.
    """
    metadata = session.metadata
    wanted = len(metadata.dims), len(metadata.kernels)
    points: dict[int, list[list[tuple[float, float]]]] = {}
    overhead_ns = 0.0
    for measurement in measurements:
        found = len(measurement.dims), len(measurement.times_ns)
        if found != wanted:
            raise ValueError(
                f"A measurement of {found[1]} kernels and {found[0]} dims does not belong to "
                f"{metadata.function}, which has {wanted[1]} and {wanted[0]}."
            )
        works, overhead_ns = session.kernel_work(measurement.dims)
        of_threads = points.setdefault(measurement.threads, [[] for _ in works])
        for kernel, point in enumerate(zip(works, measurement.times_ns, strict=True)):
            of_threads[kernel].append(point)
    session.set_kernel_times([], [])
    for threads, kernels in sorted(points.items()):
        lines = [fit_line(of_kernel, overhead_ns) for of_kernel in kernels]
        factors, fixed_ns = ([line[k] for line in lines] for k in (0, 1))
        session.set_kernel_times(factors, fixed_ns, threads=threads)


def fit_line(points: Sequence[tuple[float, float]], overhead_ns: float) -> tuple[float, float]:
    """Fit ``time = factor * work + fixed`` by relative least squares, both at least zero.

    ``points``: work and measured time, in ns, at least one. ``overhead_ns``: what the uncalibrated
    model adds to the work: decides the split of a single work.
    """
    weighted = [(work, time, 1.0 / max(time, 1.0) ** 2) for work, time in points]
    total = sum(w for *_, w in weighted)
    mean_work = sum(w * work for work, _, w in weighted) / total
    mean_time = sum(w * time for _, time, w in weighted) / total
    spread = sum(w * (work - mean_work) ** 2 for work, _, w in weighted) / total
    if spread <= (1e-9 * (mean_work + 1.0)) ** 2:
        ratio = mean_time / (mean_work + overhead_ns)
        return ratio, ratio * overhead_ns
    together = sum(w * (work - mean_work) * (time - mean_time) for work, time, w in weighted)
    factor = together / total / spread
    fixed = mean_time - factor * mean_work
    if factor < 0.0:
        return 0.0, mean_time
    if fixed < 0.0:
        square = sum(w * work * work for work, _, w in weighted)
        return sum(w * work * time for work, time, w in weighted) / square, 0.0
    return factor, fixed
