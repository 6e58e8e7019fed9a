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

from relax_disc.vm_builtins.plan_metadata import PlanMetadata, run_program
from relax_disc.vm_builtins.runtime_twin_plan import CostModel
from relax_disc.vm_builtins.session import Session


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of a function's kernels at one shape.

    Attributes
    ----------
    dims : tuple of int
        The shape, as `PlanMetadata.dims` counts.
    times_ns : tuple of float
        Of one execution of each kernel.
    threads : int
        How many ran it.
    """

    dims: tuple[int, ...]
    times_ns: tuple[float, ...]
    threads: int = field(default_factory=torch.get_num_threads)


def measured(session: Session) -> Measurement:
    """Return what the calls inside the last `Session.profile` measured; all of one shape.

    Raises
    ------
    ValueError
        No call was profiled.
    """
    times = session.kernel_times()
    if not all(runs for runs, _ in times):
        raise ValueError("A measurement needs a call inside Session.profile() first.")
    return Measurement(session.report().dims, tuple(time / runs for runs, time in times))


def apply_measurements(session: Session, measurements: Sequence[Measurement]) -> None:
    """Model times by what was measured on as many threads, else by defaults; drops all plans."""
    models = {0: CostModel()}
    for threads in sorted({each.threads for each in measurements}):
        own = [each for each in measurements if each.threads == threads]
        models[threads] = fit_model(session.metadata, own)
    for threads, model in models.items():
        rates = model.flops_per_ns, model.bytes_per_ns, model.overhead_ns
        session.set_cost_model(*rates, model.factors, model.fixed_ns, threads=threads)


def fit_model(metadata: PlanMetadata, measurements: Sequence[Measurement]) -> CostModel:
    """Fit every kernel's line.

    Raises
    ------
    ValueError
        A measurement is of another function: it has another number of kernels or dims.
    """
    start = CostModel()
    for measurement in measurements:
        found = len(measurement.dims), len(measurement.times_ns)
        if found != (len(metadata.dims), len(metadata.kernels)):
            raise ValueError(
                f"A measurement of {found[1]} kernels and {found[0]} dims does not belong to "
                f"{metadata.function}, which has {len(metadata.kernels)} and {len(metadata.dims)}."
            )
    lines = []
    for index, kernel in enumerate(metadata.kernels):
        points = []
        for measurement in measurements:
            flops, moved = (
                run_program(metadata.programs[program], measurement.dims)
                for program in (kernel.flops, kernel.moved_bytes)
            )
            points.append((start.work(flops, moved), measurement.times_ns[index]))
        lines.append(fit_line(points, start.overhead_ns))
    return CostModel(
        factors=tuple(factor for factor, _ in lines), fixed_ns=tuple(fixed for _, fixed in lines)
    )


def fit_line(points: Sequence[tuple[float, float]], overhead_ns: float) -> tuple[float, float]:
    """Fit ``time = factor * work + fixed`` by relative least squares, both at least zero.

    Parameters
    ----------
    points : sequence of (float, float)
        Work and measured time, in ns, at least one.
    overhead_ns : float
        What the uncalibrated model adds to the work: decides the split of a single work.

    Returns
    -------
    factor, fixed : float
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
