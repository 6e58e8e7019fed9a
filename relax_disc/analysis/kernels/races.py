"""Find races of a kernel's threads before code is made of it.

Two threads race at an element of global memory that one of them writes, unless a barrier of their
block lies between.  A kernel, lowered to loops over bound threads, is walked once for a few sizes;
what sampled blocks and all of their threads touch are arrays of places, so a clamped index or a
thread that works for others is seen as it will run.
Limits: sizes, blocks and turns of loops are samples, not all; shared memory is not looked at.  An
index that is read from memory may be any: whatever else is written there races with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.mutate import walk
from relax_disc.analysis.kernels.stages import is_buffer, nodes_of

APART_ATTRIBUTE = "relax_disc.threads_apart"
"""Of a kernel whose rule knows that threads write apart, at places that are read from memory."""

# Less than a warp; more, of a length that is no multiple of a vector's, and of one that is.
_SIZES = (3, 70, 72)
# Of loops that have so many around them; what is deeper runs once.
_TURNS = (4, 4, 2, 2, 2, 2)

_BINARY: dict[type, Any] = {
    prim.Add: np.add,
    prim.Sub: np.subtract,
    prim.Mul: np.multiply,
    prim.Min: np.minimum,
    prim.Max: np.maximum,
    prim.EQ: np.equal,
    prim.NE: np.not_equal,
    prim.LT: np.less,
    prim.LE: np.less_equal,
    prim.GT: np.greater,
    prim.GE: np.greater_equal,
    prim.And: np.logical_and,
    prim.Or: np.logical_or,
}
_DIVISIONS: dict[type, Any] = {
    prim.FloorDiv: np.floor_divide,
    prim.FloorMod: np.mod,
    prim.Div: np.floor_divide,
    prim.Mod: np.mod,
}
_INTRINSICS = {
    "tirx.shift_right": np.right_shift,
    "tirx.shift_left": np.left_shift,
    "tirx.bitwise_and": np.bitwise_and,
    "tirx.bitwise_or": np.bitwise_or,
    "tirx.bitwise_xor": np.bitwise_xor,
}
_GUARDS = ("prim.if_then_else", "tirx.if_then_else")
_BARRIER = "tirx.tvm_storage_sync"


@dataclass(frozen=True, slots=True)
class _Touch:
    """What one statement touches of one buffer: of each point its place, thread and so on."""

    places: Any
    blocks: Any
    threads: Any
    barriers: int
    is_write: bool
    is_anywhere: bool  # its places are not known


@dataclass
class _Launch:
    touches: dict[Any, list[_Touch]] = field(default_factory=dict)
    has_one_thread: bool = False


def racing(func: tirx.PrimFunc, pairs: Iterable[tuple[int, int]]) -> tuple[bool, list[Any]]:
    """Tell whether threads race as a kernel stands, and which results race over which operands.

    ``func``: lowered to loops; no barrier is left to be put in by TVM. ``pairs``: operands and the
    results that may be written over them, as of `inplace_pairs`. Returned: whether they race with
    all buffers apart, and those of ``pairs`` of which the result may not lie over the operand.
    """
    races, overlaid = False, []
    pairs = list(pairs)
    if APART_ATTRIBUTE in func.attrs:
        return races, overlaid
    params = func.params
    for turn in range(len(_SIZES)):
        for launch in _Walk(func, turn).launches:
            if launch.has_one_thread:
                continue
            races = races or any(map(_race, launch.touches.values()))
            for pair in pairs:
                both = [launch.touches.get(params[at], []) for at in pair]
                if pair not in overlaid and both[0] and both[1] and _race([*both[0], *both[1]]):
                    overlaid.append(pair)
    return races, overlaid


def _race(touches: Sequence[_Touch]) -> bool:
    if not any(touch.is_write for touch in touches):
        return False
    places = np.concatenate([touch.places for touch in touches])
    if any(touch.is_anywhere for touch in touches):
        places[:] = 0
    blocks = np.concatenate([touch.blocks for touch in touches])
    threads = np.concatenate([touch.threads for touch in touches])
    counts = [touch.places.size for touch in touches]
    barriers = np.repeat([touch.barriers for touch in touches], counts)
    writes = np.repeat([touch.is_write for touch in touches], counts)
    order = np.lexsort((threads, barriers, blocks, places))
    places, blocks, barriers, threads, writes = (
        column[order] for column in (places, blocks, barriers, threads, writes)
    )
    same_place = places[1:] == places[:-1]
    same_block = same_place & (blocks[1:] == blocks[:-1])
    same_time = same_block & (barriers[1:] == barriers[:-1])
    return _differ(same_place, blocks, writes) or _differ(same_time, threads, writes)


def _differ(same: Any, who: Any, writes: Any) -> bool:
    """Whether a run of ``same`` has a write and is touched by several."""
    run = np.concatenate([[0], np.cumsum(~same)])
    written = np.bincount(run, weights=writes) > 0
    several = np.bincount(run[1:], weights=same & (who[1:] != who[:-1]), minlength=len(written)) > 0
    return bool((written & several).any())


class _Walk:
    """Runs through the statements of a kernel at some sizes.

    The values of variables are numpy arrays over (turns of loops ..., block, thread), of which an
    axis is 1 where they do not depend on it; None where they are not known.
    """

    def __init__(self, func: tirx.PrimFunc, turn: int) -> None:
        self.launches: list[_Launch] = []
        self._values: dict[Any, Any] = {}
        self._storage: dict[Any, Any] = {}
        self._mask: Any = np.True_
        self._barriers = 0
        self._depth = 0
        self._launch: _Launch | None = None
        sizes = cycle(_SIZES[turn:] + _SIZES[:turn])
        for param in func.params:
            if is_buffer(param):
                self._storage[param] = param
                for extent in param.shape:
                    walk(extent, tvm.ir.Var, lambda v: self._size(v, sizes))
            else:
                self._size(param, sizes)
        self._visit(func.body)

    def _size(self, var: Any, sizes: Any) -> None:
        if var not in self._values:
            self._values[var] = np.int64(next(sizes))

    # ---- statements ----------------------------------------------------------------------------

    def _visit(self, node: Any) -> None:
        if isinstance(node, tirx.SeqStmt):
            for statement in node.seq:
                self._visit(statement)
        elif isinstance(node, tirx.BufferStore):
            self._value(node.value)
            self._touch(node.buffer, node.indices, True)
        elif isinstance(node, tirx.For):
            self._loop(node)
        elif isinstance(node, tirx.IfThenElse):
            condition = self._value(node.condition)
            self._where(condition, lambda: self._visit(node.then_case))
            if node.else_case is not None:
                self._where(_negated(condition), lambda: self._visit(node.else_case))
        elif isinstance(node, tirx.Bind):
            self._values[node.var] = self._value(node.value)
        elif isinstance(node, tirx.AttrStmt):
            if node.attr_key == "thread_extent" and self._launch is None:
                self._bind_threads(node)
            else:
                self._visit(node.body)
        elif isinstance(node, tirx.DeclBuffer):
            data = node.data.args[0] if isinstance(node.data, tvm.ir.Call) else None
            if data in self._storage:
                self._storage[node.buffer] = self._storage[data]
        elif isinstance(node, tirx.AllocBuffer):
            if node.buffer.scope() == "global":
                self._storage[node.buffer] = node.buffer
        elif isinstance(node, tirx.Evaluate):
            if _name(node.value) == _BARRIER:
                self._barriers += 1
            else:
                self._value(node.value)
        elif isinstance(node, tirx.While):
            self._value(node.condition)
            self._visit(node.body)
        else:
            raise TypeError(f"{type(node).__name__} in a lowered kernel")

    def _bind_threads(self, node: Any) -> None:
        extents: dict[str, tuple[Any, int]] = {}
        body = node
        while isinstance(body, tirx.AttrStmt):
            if body.attr_key == "thread_extent":
                extents[body.node.thread_tag] = body.node.var, int(self._value(body.value))
            body = body.body
        self._launch = _Launch()
        for kind in ("blockIdx", "threadIdx"):
            of = [extents.get(f"{kind}.{axis}", (None, 1)) for axis in "xyz"]
            count = of[0][1] * of[1][1] * of[2][1]
            if kind == "blockIdx":
                index = _sample_blocks(count, body)
                self._blocks, blocks = index, count
            else:
                index = np.arange(count)
                self._threads, self._launch.has_one_thread = index, blocks * count == 1
            for var, extent in of:
                if var is not None:
                    self._values[var] = index % extent
                index = index // max(extent, 1)
        self._visit(body)
        self.launches.append(self._launch)
        self._launch = None

    def _loop(self, node: Any) -> None:
        extent = self._value(node.extent)
        start = self._value(node.min)
        if extent is None or start is None:
            self._values[node.loop_var] = None
            self._visit(node.body)
            return
        longest = int(np.max(extent))
        if longest <= 0:
            return
        most = _TURNS[self._depth] if self._depth < len(_TURNS) else 1
        turns = np.unique([*range(min(longest, most - 1)), longest - 1])
        if _has_barrier(node.body):
            for turn in turns:
                self._values[node.loop_var] = start + turn
                self._where(turn < extent, lambda: self._visit(node.body))
            return
        self._depth += 1
        turns = turns.reshape(-1, *[1] * (self._depth + 1))
        self._values[node.loop_var] = start + turns
        self._where(turns < extent, lambda: self._visit(node.body))
        self._depth -= 1

    def _where(self, condition: Any, visit: Any) -> None:
        before = self._mask
        if condition is not None:
            self._mask = np.logical_and(before, condition)
        visit()
        self._mask = before

    def _touch(self, buffer: Any, indices: Sequence[Any], is_write: bool) -> None:
        found = [self._value(index) for index in indices]
        storage = self._storage.get(buffer)
        if self._launch is None or storage is None or not np.any(self._mask):
            return
        place: Any = np.int64(0)
        for index, extent in zip(found, buffer.shape, strict=True):
            size = self._value(extent)
            place = None if place is None or index is None or size is None else place * size + index
        is_anywhere = place is None
        place = np.int64(0) if is_anywhere else place
        shape = np.broadcast_shapes(
            np.shape(place), np.shape(self._mask), (len(self._blocks), len(self._threads))
        )
        mask = np.broadcast_to(self._mask, shape)
        where, block, thread = (
            np.broadcast_to(each, shape)[mask] for each in (place, self._blocks, self._threads)
        )
        touch = _Touch(where, block, thread, self._barriers, is_write, is_anywhere)
        self._launch.touches.setdefault(storage, []).append(touch)

    # ---- expressions ---------------------------------------------------------------------------

    def _value(self, node: Any) -> Any:
        """Evaluate an expression of integers, noting what is read; None where it is not known."""
        if isinstance(node, prim.IntImm):
            return np.int64(int(node.value))
        if isinstance(node, tvm.ir.Var):
            return self._values.get(node)
        if isinstance(node, tvm.ir.TensorLoad):
            self._touch(node.source, node.indices, False)
            return None
        kind = type(node)
        if kind in _BINARY:
            left, right = self._value(node.a), self._value(node.b)
            return None if left is None or right is None else _BINARY[kind](left, right)
        if kind in _DIVISIONS:
            left, right = self._value(node.a), self._value(node.b)
            if left is None or right is None:
                return None
            return _DIVISIONS[kind](left, np.where(right == 0, 1, right))
        if isinstance(node, prim.Not):
            return _negated(self._value(node.a))
        if isinstance(node, prim.Cast):
            value = self._value(node.value)
            return value if "int" in str(node.ty.dtype) or str(node.ty.dtype) == "bool" else None
        if isinstance(node, prim.Select):
            return self._chosen(node.condition, node.true_value, node.false_value)
        if isinstance(node, prim.Let):
            self._values[node.var] = self._value(node.value)
            return self._value(node.body)
        if isinstance(node, tvm.ir.Call):
            if _name(node) in _GUARDS:
                return self._chosen(*node.args)
            values = [self._value(argument) for argument in node.args]
            apply = _INTRINSICS.get(_name(node))
            if apply is None or any(value is None for value in values):
                return None
            return apply(*values)
        if isinstance(node, prim.Ramp | prim.Broadcast | prim.Shuffle):
            raise TypeError("a vector in a kernel that is not vectorised yet")
        return None

    def _chosen(self, condition: Any, if_true: Any, if_false: Any) -> Any:
        found = self._value(condition)
        values: list[Any] = []
        self._where(found, lambda: values.append(self._value(if_true)))
        self._where(_negated(found), lambda: values.append(self._value(if_false)))
        if found is None or values[0] is None or values[1] is None:
            return None
        return np.where(found, *values)


def _sample_blocks(count: int, body: Any) -> Any:
    """Blocks to look at: the first, the last, and those where a kernel does something else."""
    numbers = {0, 1, count - 1}

    def note(comparison: Any) -> None:
        for side in (comparison.a, comparison.b):
            if isinstance(side, prim.IntImm):
                numbers.update((int(side.value) - 1, int(side.value)))

    walk(body, (prim.LT, prim.LE, prim.GT, prim.GE), note)
    return np.array(sorted(n for n in numbers if 0 <= n < count))[:, None]


def _negated(condition: Any) -> Any:
    return None if condition is None else np.logical_not(condition)


def _name(node: Any) -> str:
    return getattr(node.op, "name", "") if isinstance(node, tvm.ir.Call) else ""


def _has_barrier(body: Any) -> bool:
    return any(_name(call) == _BARRIER for call in nodes_of(tvm.ir.Call, body))
