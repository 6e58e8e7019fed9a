"""Read a kernel in TVM's block form as a list of stages: plain data for rules and proofs.

A *stage* computes one buffer, element by element or as a reduction over some of its axes.
Everything that legalization and fusion emit has this form, except kernels written as raw loops
(sorts, scatters) and reductions of tuples (arg-max); for those the reader answers None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.mutate import walk

Combiner = Literal["add", "max", "min", "mul"]

_COMBINERS: dict[type, Combiner] = {
    prim.Add: "add",
    prim.Max: "max",
    prim.Min: "min",
    prim.Mul: "mul",
}


@dataclass(frozen=True, eq=False)
class Axis:
    """One iterator of a stage, running over ``[0, extent)``."""

    var: Any
    extent: Any
    is_reduction: bool


@dataclass(frozen=True, eq=False)
class Stage:
    """``buffer[indices] = value`` for all axes; with ``combiner``, accumulated from ``init``.

    For a reduction ``value`` is what one step contributes, without the running total.  Stages that
    were stores of one block have the same ``lets``: values named before the first store.
    """

    name: str
    axes: tuple[Axis, ...]
    buffer: Any
    indices: tuple[Any, ...]
    value: Any
    init: Any = None
    combiner: Combiner | None = None
    lets: tuple[tuple[Any, Any], ...] = ()

    @property
    def expressions(self) -> list[Any]:
        """Everything that is evaluated for one element."""
        return [expr for _, expr in self.lets] + [self.value]

    @property
    def spatial(self) -> tuple[Axis, ...]:
        """Axes that select the element being computed."""
        return tuple(axis for axis in self.axes if not axis.is_reduction)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        """Axes that are summed (or otherwise combined) away."""
        return tuple(axis for axis in self.axes if axis.is_reduction)


@dataclass(frozen=True, eq=False)
class StagedKernel:
    """A kernel as stages in program order."""

    func: Any  # the function that was read
    # buffers among the parameters: read only, and written
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    local: tuple[Any, ...]  # buffers that live inside the kernel only
    stages: tuple[Stage, ...]  # program order


def is_buffer(var: object) -> bool:
    """Whether a parameter of a function is a buffer (and not a scalar)."""
    return isinstance(var, tvm.ir.Var) and isinstance(var.ty, tirx.BufferType)


def nodes_of(kind: type | tuple[type, ...], expr: object) -> list[Any]:
    """Return the nodes of a kind, or kinds, inside an expression or several, in post-order."""
    found: list[Any] = []
    walk(expr, kind, found.append)
    return found


def loads_of(expr: object) -> list[Any]:
    """Return every read of a buffer inside an expression, in post-order, with repetitions."""
    return nodes_of(tvm.ir.TensorLoad, expr)


def same_expr(left: object, right: object) -> bool:
    """Whether two expressions are structurally equal (no algebra)."""
    return bool(tvm_ffi.structural_equal(left, right))


def constant(expr: object) -> int | None:
    """Return the value of an integer constant, None for anything else."""
    if isinstance(expr, int):
        return expr
    return int(expr.value) if isinstance(expr, prim.IntImm) else None


def read_stages(func: tirx.PrimFunc) -> StagedKernel | None:
    """Read a function in block form, as TE and `FuseTIR` make it.

    ``func``: any function; it is not changed. ``kernel``: None when any part has another form (raw
    loops, predicates, tuple reductions).
    """
    root = func.body
    if not isinstance(root, s_tir.SBlockRealize) or root.block.iter_vars:
        return None
    block = root.block
    if block.match_buffers or block.init is not None:
        return None
    statements = block.body.seq if isinstance(block.body, tirx.SeqStmt) else [block.body]
    stages = []
    for statement in statements:
        read = _read_nest(statement)
        if read is None:
            return None
        stages += read
    written = {stage.buffer for stage in stages}
    if len(written) != len(stages):
        return None
    buffers = [param for param in func.params if is_buffer(param)]
    if any(buffer.strides or constant(buffer.elem_offset) != 0 for buffer in buffers):
        return None
    return StagedKernel(
        func=func,
        inputs=tuple(buffer for buffer in buffers if buffer not in written),
        outputs=tuple(buffer for buffer in buffers if buffer in written),
        local=tuple(block.alloc_buffers),
        stages=tuple(stages),
    )


def loops_of(kernel: tirx.PrimFunc) -> list[Stage] | None:
    """Read a kernel of loops round one store each, which run in the order of the program.

    A parallel loop is read as one in order where each of its turns writes elements of its own.
    """
    root = kernel.body
    if not isinstance(root, s_tir.SBlockRealize) or root.block.iter_vars:
        return None
    block = root.block
    if block.alloc_buffers or block.match_buffers or block.init is not None:
        return None
    body = block.body
    while isinstance(body, tirx.AttrStmt):
        body = body.body
    found = []
    for statement in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        axes, parallel = [], []
        while isinstance(statement, tirx.For):
            if statement.kind == tirx.ForKind.PARALLEL:
                parallel.append(statement.loop_var)
            elif statement.kind != tirx.ForKind.SERIAL:
                return None
            if constant(statement.min) != 0:
                return None
            axes.append(Axis(statement.loop_var, statement.extent, is_reduction=False))
            statement = statement.body
        if not isinstance(statement, tirx.BufferStore):
            return None
        indices = tuple(statement.indices)
        if not all(any(var.same_as(index) for index in indices) for var in parallel):
            return None
        found.append(Stage("loops", tuple(axes), statement.buffer, indices, statement.value))
    return found


def _read_nest(statement: Any) -> list[Stage] | None:
    """Read one loop nest round one block: a stage for each store."""
    loops: list[Any] = []
    while isinstance(statement, tirx.For):
        if statement.kind != tirx.ForKind.SERIAL or constant(statement.min) != 0:
            return None
        if statement.annotations or statement.thread_binding is not None:
            return None
        loops.append(statement.loop_var)
        statement = statement.body
    if not isinstance(statement, s_tir.SBlockRealize) or constant(statement.predicate) != 1:
        return None
    block = statement.block
    if block.alloc_buffers or block.match_buffers:
        return None
    axes = _read_axes(block, statement.iter_values, loops)
    if axes is None:
        return None
    if any(axis.is_reduction for axis in axes):
        stage = _read_reduction(block, axes)
        return None if stage is None else [stage]
    return _read_stores(block, axes) if block.init is None else None


def _read_reduction(block: Any, axes: tuple[Axis, ...]) -> Stage | None:
    store = block.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(block.init, tirx.BufferStore):
        return None
    combined = _split_update(store)
    if combined is None:
        return None
    combiner, value = combined
    return Stage(
        name=block.name_hint,
        axes=axes,
        buffer=store.buffer,
        indices=tuple(store.indices),
        value=value,
        init=block.init.value,
        combiner=combiner,
    )


def _read_stores(block: Any, axes: tuple[Axis, ...]) -> list[Stage] | None:
    """Read named values followed by stores, none of which is read again in the block."""
    body = block.body.seq if isinstance(block.body, tirx.SeqStmt) else [block.body]
    lets = tuple((item.var, item.value) for item in body if isinstance(item, tirx.Bind))
    stores = body[len(lets) :]
    if any(isinstance(item, tirx.Bind) for item in stores) or not all(
        isinstance(item, tirx.BufferStore) for item in stores
    ):
        return None
    written = {store.buffer for store in stores}
    evaluated = [expr for _, expr in lets] + [store.value for store in stores]
    if any(load.source in written for expr in evaluated for load in loads_of(expr)):
        return None
    return [
        Stage(
            name=block.name_hint if len(stores) == 1 else f"{block.name_hint}_{position}",
            axes=axes,
            buffer=store.buffer,
            indices=tuple(store.indices),
            value=store.value,
            lets=lets,
        )
        for position, store in enumerate(stores)
    ]


def _read_axes(block: Any, iter_values: Any, loops: list[Any]) -> tuple[Axis, ...] | None:
    axes = []
    used = set()
    for iter_var, value in zip(block.iter_vars, iter_values, strict=True):
        kind = int(iter_var.iter_type)
        if kind not in (0, 2) or constant(iter_var.dom.min) != 0:
            return None
        if isinstance(value, prim.Cast):
            value = value.value
        if isinstance(value, tvm.ir.Var):
            if value not in loops or value in used:
                return None
            used.add(value)
        elif constant(value) != 0 or constant(iter_var.dom.extent) != 1:
            return None
        axes.append(Axis(iter_var.var, iter_var.dom.extent, kind == 2))
    return tuple(axes) if len(used) == len(loops) else None


def _split_update(store: Any) -> tuple[Combiner, Any] | None:
    """Split ``b[i] = combine(b[i], x)`` into the name of the combiner and ``x``."""
    combiner = _COMBINERS.get(type(store.value))
    if combiner is None:
        return None

    def is_total(expr: object) -> bool:
        return (
            isinstance(expr, tvm.ir.TensorLoad)
            and expr.source.same_as(store.buffer)
            and same_expr(expr.indices, store.indices)
        )

    for total, value in ((store.value.a, store.value.b), (store.value.b, store.value.a)):
        if is_total(total) and not any(
            load.source.same_as(store.buffer) for load in loads_of(value)
        ):
            return combiner, value
    return None
