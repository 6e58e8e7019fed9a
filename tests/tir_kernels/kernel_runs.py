"""Make kernels as the pipeline does, schedule them, run them on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax, tirx

from relax_disc.tir_kernels import cpu_target, rules_for
from relax_disc.transform.schedule_kernels import schedule_kernel

TARGET = cpu_target()


def tensor(name: str, shape: Sequence, dtype: str = "float32") -> relax.Var:
    """Declare a tensor parameter."""
    return relax.Var(name, relax.TensorType(list(shape), dtype))


def fused_kernel(params: Sequence[relax.Var], build: Callable) -> tirx.PrimFunc:
    """Legalize and fuse ``build(emit, *params)`` into what must be one kernel."""
    builder = relax.BlockBuilder()
    with builder.function("main", list(params)):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, *params))
        builder.emit_func_output(result)
    mod = builder.get()
    with TARGET:
        mod = tvm.transform.Sequential(relax.pipeline.legalize_passes(TARGET))(mod)
    kernels = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert len(kernels) == 1, [var.name_hint for var in mod.functions]
    return kernels[0]


def rule_of(func: tirx.PrimFunc) -> str | None:
    """Name the rule that takes a kernel."""
    for rule in rules_for(TARGET):
        if rule.apply(func, TARGET, False) is not None:
            return type(rule).__name__
    return None


def scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Schedule a kernel as the pass does."""
    return schedule_kernel(func, TARGET, rules_for(TARGET))


class Library:
    """Kernels compiled together, callable by name."""

    def __init__(self, functions: dict[str, tirx.PrimFunc], *, noalias: bool = True) -> None:
        named = {}
        for name, func in functions.items():
            if not noalias and "tirx.noalias" in func.attrs:
                func = func.without_attr("tirx.noalias")
            named[name] = func.with_attr("global_symbol", name)
        self._module = tvm.compile(tvm.IRModule(named), TARGET)

    def __call__(self, name: str, *arrays: np.ndarray | int) -> None:
        """Call a kernel on its parameters in order; arrays are copied in and out.

        An array that is passed twice is one buffer of the kernel.
        """
        buffers = {
            id(array): (array, tvm.runtime.tensor(array))
            for array in arrays
            if isinstance(array, np.ndarray)
        }
        self._module[name](
            *(buffers[id(array)][1] if id(array) in buffers else array for array in arrays)
        )
        for array, buffer in buffers.values():
            array[...] = buffer.numpy()


def set_threads(count: int) -> None:
    """Let kernels use this many threads."""
    tvm.get_global_func("runtime.config_threadpool")(1, count)
