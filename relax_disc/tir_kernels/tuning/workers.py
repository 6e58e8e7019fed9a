"""What MetaSchedule's worker processes run: make a candidate's code, make its operands."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.target import Target

from relax_disc.tir_kernels.binding import keep_in_buffers
from relax_disc.tir_kernels.tuning.replay import by_settings
from relax_disc.tir_kernels.vector_math import use_vector_math
from relax_disc.vm_builtins import runtime


def start() -> None:
    """Load the library that threads and kernels' functions come from, without a word."""
    logging.getLogger("relax_disc").setLevel(logging.WARNING)  # TVM's workers log all to stderr
    runtime.load()


def build(made: tuple[tvm.IRModule, Target]) -> str:
    """Make a candidate's code as `ScheduleKernels` would; return the path of a shared library."""
    mod, target = made
    (candidate,) = mod.functions.values()
    found = by_settings(candidate, candidate, target)
    scheduled = candidate if found is None else found.mod["main"]
    finished = keep_in_buffers(use_vector_math(scheduled)).with_attr("global_symbol", "main")
    path = Path(tempfile.mkdtemp(prefix="relax_disc-tune-")) / "candidate.so"
    compiled({"main": finished}, target).export_library(str(path))
    return str(path)


def compiled(kernels: dict[str, tirx.PrimFunc], target: Target) -> Any:
    """Make code of kernels, without checks of arguments, as a step's are."""
    named = {name: kernel.with_attr("global_symbol", name) for name, kernel in kernels.items()}
    with tvm.transform.PassContext(opt_level=3, config={"tirx.disable_assert": True}):
        return tvm.compile(tvm.IRModule(named), target)


def operands(device: Any, arguments: Any, repeats: int) -> list[list[Any]]:
    """Make the operands of a measurement, as MetaSchedule describes them."""
    shapes = [(str(dtype), [int(size) for size in shape]) for _, dtype, shape in arguments]
    generator = np.random.default_rng(0)
    made = [tvm.runtime.tensor(array, device) for array in arrays(shapes, generator)]
    return [made for _ in range(repeats)]


def arrays(shapes: list[tuple[str, list[int]]], generator: np.random.Generator) -> list[Any]:
    """Draw operands: positive numbers, and indices that are inside every axis."""
    least = min((size for _, shape in shapes for size in shape), default=1)
    made = []
    for dtype, shape in shapes:
        if dtype == "bool":
            array = generator.integers(0, 2, shape).astype("bool")
        elif "int" in dtype:
            array = generator.integers(0, max(least, 1), shape).astype(dtype)
        else:
            array = generator.uniform(0.1, 1.1, shape).astype("float32").astype(_numpy(dtype))
        made.append(array)
    return made


def _numpy(dtype: str) -> Any:
    if dtype == "bfloat16":
        import ml_dtypes  # what TVM's arrays of bfloat16 are made of

        return ml_dtypes.bfloat16
    return dtype
