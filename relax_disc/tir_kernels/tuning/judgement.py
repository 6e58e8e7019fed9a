"""Whether a candidate computes what the kernel does, and is faster than the rule.

Values: equal to those by the rule but for rounding, and no farther from those of the kernel without
any schedule (whose sums are rounded at each term), at several shapes, also where a result lies over
an operand.  Times: candidate, rule, and the rule's code once more take
turns; a difference counts when it is larger than that between the two equal ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.inplace import inplace_pairs
from relax_disc.analysis.kernels.stages import is_buffer
from relax_disc.tir_kernels.target import cpu_target
from relax_disc.tir_kernels.tuning import workers
from relax_disc.tir_kernels.tuning.tasks import Sizes, operand_shapes

# In units of the last place of the largest element.  Sums of the rules are rounded once.
_ROUNDINGS = 16
_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
# Less than this is nothing, however quiet the machine.
_LEAST_GAIN = 0.02
_ROUNDS = 16
_SESSIONS = 2
_SAMPLE_SECONDS = 3e-4


@dataclass(frozen=True, slots=True)
class Timing:
    """Times at one shape.

    ``shape``: of the step. ``rule_us``, ``tuned_us``: medians, in microseconds. ``ratio``,
    ``low``, ``high``: median of tuned / rule of the pairs, and the 95 % interval of that median.
    ``noise``: how far the median of the rule against itself is from 1. ``modelled``: nothing was
    measured: a model told the times.
    """

    shape: Mapping[str, int]
    rule_us: float
    tuned_us: float
    ratio: float
    low: float
    high: float
    noise: float
    modelled: bool = False

    @property
    def faster(self) -> bool:
        """Faster by more than noise."""
        return self.high < 1 - self._margin()

    @property
    def slower(self) -> bool:
        """Slower by more than noise."""
        return self.low > 1 + self._margin()

    def _margin(self) -> float:
        return max(_LEAST_GAIN, 2 * self.noise)


def differences(
    kernel: tirx.PrimFunc,
    rule: tirx.PrimFunc,
    candidate: tirx.PrimFunc,
    target: Target,
    shapes: Sequence[Sizes],
    compiled: Callable[[dict[str, tirx.PrimFunc], Target], Any] = workers.compiled,
) -> str | None:
    """Compare a candidate's values with the kernel's own; say what differs, None: nothing.

    ``rule``, ``candidate``: with the same parameters, scheduled. ``shapes``: sizes to try.
    ``compiled``: makes functions of them that take buffers of the host.
    """
    plain = {"plain": kernel.with_attr("tirx.is_scheduled", True)}
    reference = workers.compiled(plain, target if target.kind.name == "llvm" else cpu_target())
    code = compiled({"rule": rule, "candidate": candidate}, target)
    shared = compiled({"candidate": candidate.without_attr("tirx.noalias")}, target)
    pairs = inplace_pairs(kernel)
    for number, sizes in enumerate(shapes):
        generator = np.random.default_rng(number)
        arrays = workers.arrays(operand_shapes(kernel, sizes), generator)
        plain_values = _run(reference["plain"], kernel, sizes, arrays)
        expected = _run(code["rule"], kernel, sizes, arrays)
        runs = {"": _run(code["candidate"], kernel, sizes, arrays)}
        for pair in pairs:
            run = _run(shared["candidate"], kernel, sizes, arrays, pair)
            runs[f" over operand {pair[0]}"] = run
        for where, values in runs.items():
            for at, before in enumerate(arrays):
                if np.array_equal(before, plain_values[at]):
                    continue  # an operand
                wrong = _difference(plain_values[at], expected[at], values[at])
                if wrong:
                    at_sizes = {dim.name: size for dim, size in sizes.items()}
                    return f"result {at}{where} differs at {at_sizes}: {wrong}"
    return None


def _run(
    function: Any,
    kernel: tirx.PrimFunc,
    sizes: Sizes,
    arrays: list[Any],
    overlaid: tuple[int, int] | None = None,
) -> list[Any]:
    """Call a kernel on copies; ``overlaid``: positions of an operand and of the result over it."""
    buffers = [tvm.runtime.tensor(array) for array in arrays]
    positions = [at for at, param in enumerate(kernel.params) if is_buffer(param)]
    if overlaid is not None:
        source, result = (positions.index(at) for at in overlaid)
        buffers[result] = buffers[source]
    function(*_arguments(kernel, sizes, buffers))
    return [buffer.numpy() for buffer in buffers]


def _arguments(kernel: tirx.PrimFunc, sizes: Sizes, buffers: list[Any]) -> list[Any]:
    left = iter(buffers)
    return [next(left) if is_buffer(param) else sizes[param] for param in kernel.params]


def _difference(plain: Any, by_rule: Any, got: Any) -> str | None:
    dtype = str(plain.dtype)
    if dtype not in _BITS:
        return None if np.array_equal(plain, got) else "elements are not equal"
    unscheduled, rule, found = (each.astype("float64") for each in (plain, by_rule, got))
    finite = np.isfinite(rule)
    if not np.array_equal(finite, np.isfinite(found)):
        return "other elements are finite"
    if not finite.any():
        return None
    allowed = _ROUNDINGS * 2.0 ** -_BITS[dtype] * np.abs(rule[finite]).max()
    own = np.abs(unscheduled - rule)[finite].max()
    for name, reference, limit in (
        ("the rule's", rule, allowed),
        ("the unscheduled kernel's", unscheduled, allowed + 2 * own),
    ):
        error = np.abs(found - reference)[finite].max()
        if not error <= limit:
            return f"from {name} by {error:.3g}, rounding explains {limit:.3g}"
    return None


def time_kernels(
    kernel: tirx.PrimFunc,
    rule: tirx.PrimFunc,
    candidate: tirx.PrimFunc,
    target: Target,
    shapes: Sequence[tuple[Mapping[str, int], Sizes]],
) -> list[Timing]:
    """Time a candidate next to the rule at shapes, each given with the kernel's sizes there."""
    code = workers.compiled({"rule": rule, "again": rule, "tuned": candidate}, target)
    found = []
    for shape, sizes in shapes:
        samples: dict[str, list[float]] = {"rule": [], "again": [], "tuned": []}
        for session in range(_SESSIONS):
            generator = np.random.default_rng(session)
            arrays = workers.arrays(operand_shapes(kernel, sizes), generator)
            arguments = _arguments(kernel, sizes, [tvm.runtime.tensor(each) for each in arrays])
            runs = {name: _caller(code[name], arguments) for name in samples}
            _sample(runs, samples)
        found.append(_timing(shape, samples))
    return found


def _caller(function: Any, arguments: list[Any]) -> Callable[[int], float]:
    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            function(*arguments)
        return (time.perf_counter() - start) / times

    return run


def _sample(runs: Mapping[str, Callable[[int], float]], samples: dict[str, list[float]]) -> None:
    names = list(runs)
    longest = max(run(1) and run(1) for run in runs.values())  # the first call warms
    times = max(1, int(_SAMPLE_SECONDS / longest))
    for turn in range(_ROUNDS):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(runs[name](times))


def _timing(shape: Mapping[str, int], samples: Mapping[str, list[float]]) -> Timing:
    rule = np.array(samples["rule"])
    ratios = np.sort(np.array(samples["tuned"]) / rule)
    count = len(ratios)
    half = 0.98 * np.sqrt(count)  # of the 95 % interval of a median's rank
    low = ratios[max(0, int(np.floor(count / 2 - half)))]
    high = ratios[min(count - 1, int(np.ceil(count / 2 + half)))]
    noise = abs(float(np.median(np.array(samples["again"]) / rule)) - 1)
    return Timing(
        dict(shape),
        round(float(np.median(rule)) * 1e6, 3),
        round(float(np.median(samples["tuned"])) * 1e6, 3),
        round(float(np.median(ratios)), 4),
        round(float(low), 4),
        round(float(high), 4),
        round(noise, 4),
    )
