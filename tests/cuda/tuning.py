"""Tune kernels for CUDA without a GPU: the emulator verifies, `static_model` ranks.

`python -m tests.cuda.tuning my.py:step --target relax_disc/h100` takes the arguments of
`relax-disc tune`. What it keeps says ``"modelled": true`` beside each time.
"""

from __future__ import annotations

import functools
import itertools
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
import tvm_ffi
import typer
from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.stages import is_buffer
from relax_disc.cli.tune import tune
from relax_disc.tir_kernels.tuning import judgement, workers
from relax_disc.tir_kernels.tuning.judgement import Timing
from relax_disc.tir_kernels.tuning.search import Processes
from relax_disc.tir_kernels.tuning.tasks import Sizes, operand_shapes
from relax_disc.tir_kernels.tuning.tune import BENCHES
from tests.cuda.emulator import Emulator, Relabelled, announced
from tests.cuda.static_model import call_ns

_logger = logging.getLogger(__name__)

_CUDA = 2
_BLOCKS = 48
"""Of a launch, so many blocks are counted: more change no figure by a hundredth."""
_NOISE = 0.1
"""A candidate must be better by twice this: the model knows no more."""
_COMPILED = itertools.count()


class Emulated(Processes):
    """Makes candidates for the emulator, in this process, and asks the model for their times."""

    most_verified_bytes = 2 * 2**20
    most_ratio = 1 - 2 * _NOISE

    @functools.cached_property
    def builder(self) -> Any:
        """MetaSchedule's builder; what it makes is kept here, under a number."""
        from tvm.ir.utils import derived_object
        from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder

        made = self._made

        @derived_object
        class Builder(PyBuilder):
            def build(self, build_inputs: Any) -> list[Any]:
                return [self._build(each) for each in build_inputs]

            def _build(self, given: Any) -> Any:
                (kernel,) = given.mod.functions.values()
                try:
                    function = _compiled({"candidate": kernel}, given.target)["candidate"]
                except (tvm.error.InternalError, RuntimeError, ValueError, TypeError) as error:
                    _logger.info("a candidate makes no code: %s", error)
                    return BuilderResult(None, str(error))
                made.append((function, kernel, given.target))
                # Of a folder of its own, which MetaSchedule removes.
                folder = Path(tempfile.mkdtemp(prefix="relax_disc-tune-"))
                return BuilderResult(str(folder / str(len(made) - 1)), None)

        return Builder()

    @functools.cached_property
    def runner(self) -> Any:
        """MetaSchedule's runner."""
        from tvm.ir.utils import derived_object
        from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult

        made = self._made

        @derived_object
        class Done(PyRunnerFuture):
            def __init__(self, seconds: float) -> None:
                super().__init__()
                self.seconds = seconds

            def done(self) -> bool:
                return True

            def result(self) -> Any:
                return RunnerResult([self.seconds], None)

        @derived_object
        class Runner(PyRunner):
            def run(self, runner_inputs: Any) -> list[Any]:
                runs = [made[int(Path(each.artifact_path).name)] for each in runner_inputs]
                return [Done(modelled_ns(*run, {}) / 1e9) for run in runs]

        return Runner()

    @functools.cached_property
    def _made(self) -> list[Any]:
        return []

    @staticmethod
    def differences(
        kernel: tirx.PrimFunc,
        rule: tirx.PrimFunc,
        candidate: tirx.PrimFunc,
        target: Target,
        shapes: Sequence[Sizes],
    ) -> str | None:
        """Compare values with the kernel's on the host; a race or the like is a difference."""
        least = min(
            sum(tvm_ffi.dtype(dtype).itemsize * prod(shape) for dtype, shape in found)
            for found in (operand_shapes(kernel, sizes) for sizes in shapes)
        )
        if least > 2 * Emulated.most_verified_bytes:
            return f"{least >> 20} MiB take the emulator too long"
        emulator = Emulator.load()
        emulator.take_findings()
        wrong = judgement.differences(kernel, rule, candidate, target, shapes, _compiled)
        found = emulator.take_findings()
        return wrong or (str(found[0]).splitlines()[0] if found else None)

    @staticmethod
    def time_kernels(
        kernel: tirx.PrimFunc,
        rule: tirx.PrimFunc,
        candidate: tirx.PrimFunc,
        target: Target,
        shapes: Sequence[tuple[Mapping[str, int], Sizes]],
    ) -> list[Timing]:
        """Ask the model for the times of a candidate and of the rule."""
        code = _compiled({"rule": rule, "tuned": candidate}, target)
        found = []
        for shape, sizes in shapes:
            rule_us, tuned_us = (
                round(modelled_ns(code[name], kernel, target, sizes) / 1e3, 3) for name in code
            )
            ratio = round(tuned_us / rule_us, 4)
            found.append(
                Timing(dict(shape), rule_us, tuned_us, ratio, ratio, ratio, _NOISE, modelled=True)
            )
        return found


def modelled_ns(
    function: Callable[..., None], kernel: tirx.PrimFunc, target: Target, sizes: Sizes
) -> float:
    """Run a sample of a kernel's blocks; ``function``: of `_compiled`, with its parameters."""
    shapes = operand_shapes(kernel, sizes)
    arrays = workers.arrays(shapes, np.random.default_rng(0))
    buffers = iter([tvm.runtime.tensor(array) for array in arrays])
    names = [str(param.name) for param in kernel.params if is_buffer(param)]
    emulator = Emulator.load()
    with emulator.sampling(_BLOCKS):
        emulator.forget()
        function(*(next(buffers) if is_buffer(p) else sizes[p] for p in kernel.params))
    nbytes = {
        name: prod(shape) * tvm_ffi.dtype(dtype).itemsize
        for name, (dtype, shape) in zip(names, shapes, strict=True)
    }
    emulator.take_findings()  # a value of a block that was left out may be no index
    return call_ns(emulator.calls[-1], nbytes, target)


def _compiled(kernels: dict[str, tirx.PrimFunc], target: Target) -> dict[str, Callable[..., None]]:
    """Make functions of kernels that run on the emulator, and take buffers of the host."""
    # The emulator finds kernels by their names, so each of a process has its own.
    unique = {name: f"tuned{next(_COMPILED)}" for name in kernels}
    module = tvm.IRModule(
        {
            unique[name]: kernel.with_attr("global_symbol", unique[name])
            for name, kernel in kernels.items()
        }
    )
    with (
        Emulator.load().compiling(),
        tvm.transform.PassContext(opt_level=3, config={"tirx.disable_assert": True}),
    ):
        code = tvm.compile(announced(module), target)

    def on_device(name: str) -> Callable[..., None]:
        def run(*values: Any) -> None:
            code[name](*(_on_device(value) for value in values))

        return run

    return {name: on_device(unique[name]) for name in kernels}


def _on_device(value: Any) -> Any:
    if isinstance(value, int):
        return value
    return tvm.runtime.from_dlpack(Relabelled(value, _CUDA))


if __name__ == "__main__":
    torch.set_num_threads(1)
    BENCHES["cuda"] = Emulated
    typer.run(tune)
