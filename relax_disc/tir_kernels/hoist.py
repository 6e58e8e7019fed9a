"""Move what does not change along the innermost loop in front of it.

LLVM would do so itself where it can prove that the loop's writes leave the reads alone, which it
cannot for kernels that run in place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.element import Element, GuardDepth, is_guard
from relax_disc.analysis.kernels.mutate import mutate, walk
from relax_disc.tir_kernels.vectorizable import uses_any

_OPERATIONS = (
    tvm.ir.TensorLoad,
    tvm.ir.Call,
    prim.Add,
    prim.Sub,
    prim.Mul,
    prim.Div,
    prim.FloorDiv,
    prim.FloorMod,
    prim.Max,
    prim.Min,
    prim.Cast,
    prim.Select,
    prim.EQ,
    prim.NE,
    prim.LT,
    prim.LE,
    prim.And,
    prim.Or,
    prim.Not,
)


def hoist(
    elements: Sequence[Element], inner: Collection[Any]
) -> tuple[list[tuple[Any, Any]], list[Element]]:
    """Split the values of elements into those fixed along ``inner`` and the others.

    ``elements``: computed together in one loop. ``inner``: axes of the innermost loop. ``fixed``:
    to be evaluated once before the innermost loop, in this order. ``elements``: the same elements,
    using the fixed values.
    """
    hoister = _Hoister(inner)
    return hoister.fixed, [hoister.element(element) for element in elements]


class _Hoister(GuardDepth):
    def __init__(self, inner: Collection[Any]) -> None:
        self.fixed: list[tuple[Any, Any]] = []
        self._varying = set(inner)
        self._known: dict[Any, Any] = {}

    def element(self, element: Element) -> Element:
        lets = []
        for var, expr in element.lets:
            if self._is_fixed(expr):
                self.fixed.append((var, expr))
            else:
                lets.append((var, self._run(expr)))
                self._varying.add(var)
        return Element(element.stage, tuple(lets), self._run(element.value))

    def _is_fixed(self, expr: Any) -> bool:
        return not uses_any(expr, self._varying)

    def _run(self, expr: Any) -> Any:
        return mutate(expr, (_OPERATIONS, self._on_operation))

    def _on_operation(self, expr: Any, mutator: Any) -> Any:
        if not self.guards and _reads(expr) and self._is_fixed(expr):
            return self._name(expr)
        if not is_guard(expr):
            return mutator.default_mutate(expr)
        return self.mutate_guard(expr, mutator)

    def _name(self, expr: Any) -> Any:
        key = tvm_ffi.StructuralKey(expr)
        if key not in self._known:
            var = tirx.Var("fixed", str(expr.ty.dtype))
            self.fixed.append((var, expr))
            self._known[key] = var
        return self._known[key]


def _reads(expr: Any) -> bool:
    return walk(expr, tvm.ir.TensorLoad, lambda load: tvm_ffi.VisitInterrupt()) is not None
