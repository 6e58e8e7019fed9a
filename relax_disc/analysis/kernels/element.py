"""Inline the element-wise stages of a kernel into the stages that must remain.

What remains is an `Element`: the value of one element as a short list of named intermediate
values, so that an intermediate that is used twice is computed once and the code stays small.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.half_precision import widen_bfloat16, widen_stage
from relax_disc.analysis.kernels.mutate import mutate, walk
from relax_disc.analysis.kernels.stages import (
    Axis,
    Stage,
    StagedKernel,
    constant,
    loads_of,
    same_expr,
)

_GUARDS = ("prim.if_then_else", "tirx.if_then_else")


@dataclass(frozen=True, eq=False)
class Element:
    """A stage whose value reads parameters and reduced buffers only.

    ``stage``: the stage as it was; its axes are the free variables here. ``lets``: intermediate
    values in the order of evaluation. ``value``: the element, in terms of the axes, the lets and
    reads of buffers.
    """

    stage: Stage
    lets: tuple[tuple[Any, Any], ...]
    value: Any

    @property
    def expressions(self) -> list[Any]:
        """Everything that is evaluated for one element."""
        return [expr for _, expr in self.lets] + [self.value]


def is_guard(expr: object) -> bool:
    """Whether only one branch of ``expr`` may be evaluated."""
    return isinstance(expr, tvm.ir.Call) and getattr(expr.op, "name", "") in _GUARDS


class GuardDepth:
    """Base of mutations that do otherwise inside a guard: counts the guards around a place.

    ``guards``: how many are open where the mutation is.
    """

    guards = 0

    def mutate_guard(self, guard: Any, mutator: Any) -> Any:
        """Mutate a guard: its condition as what is around it, its branches as guarded."""
        condition = mutator.mutate(guard.args[0])
        self.guards += 1
        try:
            branches = [mutator.mutate(branch) for branch in guard.args[1:]]
        finally:
            self.guards -= 1
        return tirx.if_then_else(condition, *branches)


def substitute(expr: Any, mapping: Mapping[Any, Any]) -> Any:
    """Replace variables (axes, lets) in an expression."""
    if not mapping:
        return expr
    return mutate(expr, [(tvm.ir.Var, lambda var, mutator: mapping.get(var, var))])


def is_short_load(expr: Any) -> bool:
    """Whether an expression reads a bfloat16 buffer."""
    return isinstance(expr, tvm.ir.TensorLoad) and str(expr.ty.dtype) == "bfloat16"


def rewrite_loads(
    expr: Any,
    mapping: Mapping[Any, Any],
    read: Callable[[Any, list[Any]], Any],
    read_wide: Callable[[Any, list[Any]], Any] | None = None,
    on_call: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Replace variables, and every read of a buffer by ``read(buffer, indices)``.

    ``read_wide`` makes float32 of what is read of a bfloat16 buffer and converted at once.
    ``on_call(call, mutator)`` rewrites calls.
    """

    def on_load(load: Any, mutator: Any) -> Any:
        return read(load.source, [mutator.mutate(index) for index in load.indices])

    def on_cast(cast: Any, mutator: Any) -> Any:
        load = cast.value
        if read_wide is not None and is_short_load(load):
            value = read_wide(load.source, [mutator.mutate(index) for index in load.indices])
        else:
            value = mutator.mutate(load)
        if is_short_load(value):
            value = widen_bfloat16(value)
        dtype = str(cast.ty.dtype)
        return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)

    return mutate(
        expr,
        [
            (tvm.ir.TensorLoad, on_load),
            (prim.Cast, on_cast),
            (tvm.ir.Var, lambda var, mutator: mapping.get(var, var)),
            *([] if on_call is None else [(tvm.ir.Call, on_call)]),
        ],
    )


def axis_mapping(stage: Stage, indices: Sequence[Any]) -> dict[Any, Any] | None:
    """Map the axes of an element-wise stage so that it computes ``buffer[indices]``.

    None when the stage does not write each element at its own axes.
    """
    mapping: dict[Any, Any] = {}
    for written, wanted in zip(stage.indices, indices, strict=True):
        if isinstance(written, tvm.ir.Var):
            if written in mapping:
                return None
            mapping[written] = wanted
        elif constant(written) is None:
            return None
    for axis in stage.axes:
        if axis.var not in mapping:
            if constant(axis.extent) != 1:
                return None
            mapping[axis.var] = prim.IntImm(str(axis.var.ty.dtype), 0)
    return mapping


class Inliner:
    """Inlines the element-wise producers of one kernel.

    ``inline_outputs``: also compute anew (or share) what is an output of the kernel, instead of
    reading it back.
    """

    def __init__(self, kernel: StagedKernel, *, inline_outputs: bool) -> None:
        local = set(kernel.local)
        self._wide = {stage: widen_stage(stage) for stage in kernel.stages}
        self._producers = {
            stage.buffer: _without_lets(stage) if stage.buffer in local else stage
            for stage in self._wide.values()
            if stage.combiner is None and (inline_outputs or stage.buffer in local)
        }
        self.inlinable = all(
            axis_mapping(stage, stage.indices) is not None for stage in self._producers.values()
        )
        self._reads: dict[Stage, frozenset[Any]] = {}

    def remaining(self, kernel: StagedKernel) -> list[Stage]:
        """List the stages that cannot disappear: reductions and outputs."""
        outputs = set(kernel.outputs)
        return [
            stage
            for stage in kernel.stages
            if stage.combiner is not None or stage.buffer in outputs
        ]

    def element(self, stage: Stage) -> Element:
        """Inline everything into one stage."""
        return _ElementBuilder(self._producers).build(self._widened(stage))

    def reads(self, stage: Stage) -> frozenset[Any]:
        """Buffers that a stage reads once everything is inlined into it."""
        if stage not in self._reads:
            loads = (load for expr in self.element(stage).expressions for load in loads_of(expr))
            self._reads[stage] = frozenset(load.source for load in loads)
        return self._reads[stage]

    def elements(self, stages: Sequence[Stage]) -> list[Element]:
        """Inline everything into stages over the same axes, sharing intermediate values.

        The axes of all stages are renamed to those of the first.
        """
        builder = _ElementBuilder(self._producers)
        wide = [self._widened(stage) for stage in stages]
        return [builder.build(_rename(stage, wide[0])) for stage in wide]

    def _widened(self, stage: Stage) -> Stage:
        return self._wide.get(stage) or widen_stage(stage)


def _rename(stage: Stage, like: Stage) -> Stage:
    if stage is like:
        return stage
    mapping = {axis.var: other.var for axis, other in zip(stage.axes, like.axes, strict=True)}
    return rename_axes(stage, mapping, like.axes)


def rename_axes(stage: Stage, mapping: Mapping[Any, Any], axes: tuple[Axis, ...]) -> Stage:
    """Replace variables throughout a stage, whose axes are ``axes`` from then on."""
    return replace(
        stage,
        axes=axes,
        indices=tuple(substitute(index, mapping) for index in stage.indices),
        value=substitute(stage.value, mapping),
        lets=tuple((var, substitute(expr, mapping)) for var, expr in stage.lets),
    )


def _without_lets(stage: Stage) -> Stage:
    """Write out the named values of a stage where they are used."""
    mapping: dict[Any, Any] = {}
    for var, expr in stage.lets:
        mapping[var] = substitute(expr, mapping)
    return replace(stage, value=substitute(stage.value, mapping), lets=())


class _ElementBuilder(GuardDepth):
    """Evaluates expressions once each, as named values, in order of need."""

    def __init__(self, producers: Mapping[Any, Stage]) -> None:
        self._producers = producers
        self._known: dict[Any, Any] = {}
        self._bound: dict[Any, Any] = {}
        self._lets: list[tuple[Any, Any]] = []

    def build(self, stage: Stage) -> Element:
        start = len(self._lets)
        for var, expr in stage.lets:
            if var not in self._bound:
                named = self._run(expr)
                self._bound[var] = self._name(str(var.name), named)
        value = self._run(stage.value)
        if stage.combiner is None and stage.buffer in self._producers:
            key = (stage.buffer, tvm_ffi.StructuralKey(list(stage.indices)))
            if key not in self._known:
                self._known[key] = value = self._name(stage.name, value)
        return Element(stage, tuple(self._lets[start:]), value)

    def _name(self, name: str, value: Any) -> Any:
        # Named integers break TVM's analysis of vector loops, which takes them for scalars, and
        # named bfloat16 values its conversion to float32.
        dtype = str(value.ty.dtype)
        if isinstance(value, (tvm.ir.Var, prim.FloatImm)) or not dtype.startswith("float"):
            return value
        var = tirx.Var(f"{name}_value", dtype)
        self._lets.append((var, value))
        return var

    def _run(self, expr: Any) -> Any:
        return mutate(
            expr,
            [
                (tvm.ir.TensorLoad, self._on_load),
                (tvm.ir.Call, self._on_call),
                (prim.Cast, _on_cast),
                (tvm.ir.Var, lambda var, _: self._bound.get(var, var)),
            ],
        )

    def _on_load(self, load: Any, mutator: Any) -> Any:
        indices = [mutator.mutate(index) for index in load.indices]
        producer = self._producers.get(load.source)
        if producer is None:
            return tirx.BufferLoad(load.source, indices)
        key = (load.source, tvm_ffi.StructuralKey(indices))
        if key in self._known:
            return self._known[key]
        mapping = axis_mapping(producer, indices)
        if mapping is None:
            raise AssertionError(f"{producer.name} cannot be inlined")
        value = self._run(substitute(_without_lets(producer).value, mapping))
        if self.guards:
            return value
        self._known[key] = value = self._name(producer.name, value)
        return value

    def _on_call(self, call: Any, mutator: Any) -> Any:
        if not is_guard(call):
            return mutator.default_mutate(call)
        return self.mutate_guard(call, mutator)


def _on_cast(cast: Any, mutator: Any) -> Any:
    """Turn a cast of a truth value into a choice: TVM fails on named vectors of the former.

    Truth values that were made of bits stay bits: TVM simplifies the condition of a choice several
    times, each condition within it several times more, and masks join many conditions (six took
    200 s, and take 0.6 s).
    """
    value = mutator.mutate(cast.value)
    dtype = str(cast.ty.dtype)
    if str(value.ty.dtype) != "bool":
        return prim.Cast(dtype, value)
    if isinstance(value, prim.Cast) and "int" in dtype and _is_bit(value.value):
        return value.value.astype(dtype)
    return prim.Select(value, tirx.const(1, dtype), tirx.const(0, dtype))


def _is_bit(value: Any) -> bool:
    """Whether an integer is known to be 0 or 1."""
    if isinstance(value, prim.IntImm):
        return int(value.value) in (0, 1)
    if isinstance(value, prim.Select):
        return _is_bit(value.true_value) and _is_bit(value.false_value)
    if isinstance(value, prim.BitwiseAnd):
        return _is_bit(value.a) or _is_bit(value.b)
    if isinstance(value, (prim.BitwiseOr, prim.BitwiseXor)):
        return _is_bit(value.a) and _is_bit(value.b)
    return False


def collapse(
    axes: Sequence[Axis], expressions: Iterable[Any], indices: Iterable[Sequence[Any]]
) -> list[list[Axis]]:
    """Group neighbouring axes that every access walks through as if they were one.

    ``axes``: axes of extent 1 must have been dropped. ``expressions``: everything evaluated; its
    reads count, and any other use of an axis separates it. ``indices``: index tuples of the stores,
    each with its buffer first. ``groups``: program order; in a group of several, replacing all but
    the last axis by 0 and the last by the fused variable gives the same address.
    """
    expressions = list(expressions)
    accesses = [
        (load.source, list(load.indices)) for expr in expressions for load in loads_of(expr)
    ]
    accesses += [(store[0], list(store[1:])) for store in indices]
    uses: dict[Any, int] = {axis.var: 0 for axis in axes}

    def count(var: Any) -> None:
        if var in uses:
            uses[var] += 1

    for expr in expressions:
        walk(expr, tvm.ir.Var, count)
    for store in indices:
        for index in store[1:]:
            walk(index, tvm.ir.Var, count)
    analyzer = tvm.sym.Analyzer()
    groups = [[axes[0]]] if axes else []
    for first, second in itertools.pairwise(axes):
        if _walk_together(first, second, accesses, uses, analyzer):
            groups[-1].append(second)
        else:
            groups.append([second])
    return groups


def _walk_together(
    first: Axis,
    second: Axis,
    accesses: list[tuple[Any, list[Any]]],
    uses: Mapping[Any, int],
    analyzer: Any,
) -> bool:
    pairs = 0
    for buffer, indices in accesses:
        for position in range(len(indices) - 1):
            if indices[position] is None or not indices[position].same_as(first.var):
                continue
            extent = buffer.shape[position + 1]
            if indices[position + 1].same_as(second.var) and (
                same_expr(extent, second.extent) or analyzer.can_prove_equal(extent, second.extent)
            ):
                pairs += 1
    return pairs == uses[first.var] == uses[second.var]
