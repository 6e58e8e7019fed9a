"""The kernels of a step that can be tuned, and the sizes that they are called with.

Kernels that a rule takes: element-wise, reductions, norms, softmax, transposes.  Library calls are
not tunable, nor are kernels outside of block form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, tirx
from tvm.ir import prim
from tvm.sym.analyzer import Analyzer
from tvm.target import Target

from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.analysis.kernels.stages import constant, is_buffer, nodes_of
from relax_disc.tir_kernels import rules_for
from relax_disc.tir_kernels.tuning.database import kernel_key
from relax_disc.transform.functions import (
    is_reshape,
    program_functions,
    size_meanings,
    substitute_sizes,
)
from relax_disc.transform.fusion.fusion_groups import blocks_of
from relax_disc.transform.schedule_kernels import LOWERING_FAILURES, without_marks

Sizes = Mapping[Any, int]
"""Of all dims and integers of a kernel."""


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel of a step.

    ``name``, ``key``: in the module; by structure. ``kernel``: as `ScheduleKernels` meets it.
    ``tunes``: fields of `Settings` that its rule uses; empty for a rule without any. ``calls``:
    for each call what the kernel's dims and integers are, in the step's dims.
    """

    name: str
    key: str
    kernel: tirx.PrimFunc
    tunes: tuple[str, ...]
    calls: tuple[Mapping[Any, Any], ...]

    def sizes(self, shape: Mapping[str, int]) -> list[dict[Any, int]]:
        """Sizes of the kernel in each call of a step of a shape; calls without known ones left out.

        A call depends on dims that the shape does not tell where they come from a batch's values.
        """
        found = []
        for call in self.calls:
            sizes = {dim: value_at(meaning, shape) for dim, meaning in call.items()}
            known = {dim: size for dim, size in sizes.items() if size is not None}
            if len(known) == len(sizes):
                found.append(known)
        return found

    def largest(self, shape: Mapping[str, int]) -> dict[Any, int] | None:
        """Sizes of the call that moves most bytes at a shape; None: no call's are known."""
        found = self.sizes(shape)
        return max(found, key=self.bytes) if found else None

    def bytes(self, sizes: Sizes) -> int:
        """Bytes of all operands and results."""
        return sum(
            prod(shape) * tvm_ffi.dtype(dtype).itemsize
            for dtype, shape in operand_shapes(self.kernel, sizes)
        )

    def at(self, sizes: Sizes) -> tirx.PrimFunc:
        """Return the kernel for fixed sizes; its parameters are the buffers alone."""
        numbers = {dim: prim.IntImm(str(dim.ty.dtype), size) for dim, size in sizes.items()}
        buffers = [param for param in self.kernel.params if is_buffer(param)]
        kernel = tirx.PrimFunc(
            buffers, self.kernel.body, self.kernel.ret_type, self.kernel.attrs, self.kernel.span
        )
        return _folded(substitute_sizes(kernel, numbers))


def tasks(module: tvm.IRModule, target: Target) -> list[Task]:
    """List the kernels of a module that is ready to be scheduled, in its order."""
    calls: dict[Any, list[Mapping[Any, Any]]] = {}
    for _, function in program_functions(module):
        for call in (binding.value for block in blocks_of(function) for binding in block.bindings):
            if (
                isinstance(call, relax.Call)
                and call.op == ir.Op.get("relax.call_tir")
                and isinstance(call.args[0], ir.GlobalVar)
            ):
                meanings = size_meanings(module[call.args[0]], call)
                calls.setdefault(call.args[0], []).append(meanings)
    found = []
    for variable, called in calls.items():
        kernel = module[variable]
        if kernel.attrs.get("tirx.is_scheduled", False) or is_reshape(kernel):
            continue
        kernel = without_marks(kernel)
        rule = _rule_of(kernel, target)
        if rule is not None and isinstance(kernel.body, s_tir.SBlockRealize):
            tunes = getattr(rule, "tunes", ())
            name = variable.name_hint
            found.append(Task(name, kernel_key(kernel), kernel, tunes, tuple(called)))
    return found


def _folded(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Compute what is made of numbers alone: MetaSchedule asks for shapes of plain numbers."""
    analyzer = Analyzer()

    def fold(expr: Any, mutator: Any) -> Any:
        expr = mutator.default_mutate(expr)
        numbers = constant(expr.a) is not None and constant(expr.b) is not None
        return analyzer.simplify(expr) if numbers else expr

    kinds = (prim.Add, prim.Sub, prim.Mul, prim.FloorDiv, prim.FloorMod)
    return mutate(kernel, [(kind, fold) for kind in kinds])


def _rule_of(kernel: tirx.PrimFunc, target: Target) -> Any:
    for rule in rules_for(target):
        try:
            if rule.apply(kernel, target, False) is not None:
                return rule
        except LOWERING_FAILURES:
            continue
    return None


def value_at(expr: Any, shape: Mapping[str, int]) -> int | None:
    """Evaluate an expression of a step's dims; None where it has others."""
    found = nodes_of(tirx.Var, expr)
    if any(var.name not in shape for var in found):
        return None
    numbers = {var: prim.IntImm(str(var.ty.dtype), shape[var.name]) for var in found}
    return constant(Analyzer().simplify(substitute_sizes(expr, numbers) if found else expr))


def operand_shapes(kernel: tirx.PrimFunc, sizes: Sizes) -> list[tuple[str, list[int]]]:
    """Types and shapes of a kernel's buffers at sizes."""
    named = {dim.name: size for dim, size in sizes.items()}
    shapes = []
    for param in kernel.params:
        if is_buffer(param):
            shape = [value_at(size, named) for size in param.shape]
            assert None not in shape, f"{param.name}: {param.shape}"
            shapes.append((str(param.dtype), [size for size in shape if size is not None]))
    return shapes
