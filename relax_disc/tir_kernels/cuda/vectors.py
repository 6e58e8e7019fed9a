"""Loads and stores of 128 bits: a thread computes elements that lie side by side.

It reads each operand's with one instruction into registers, computes one after another, and writes
each result's with one.  That they lie side by side is proved.  That they begin at a multiple of 16
bytes is proved where strides are fixed, and asked by the kernel where they are not.  Buffers do:
the arena's are multiples of 256, and others are moved to a multiple of 64 before a call
(`training/call/binding.py`), which TVM's `from_dlpack` insists on.  What cannot be moved so, and
all of it where a stride is no multiple, is moved one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Range
from tvm.target import Target

from relax_disc.analysis.kernels.element import GuardDepth, is_guard, rewrite_loads, substitute
from relax_disc.analysis.kernels.stages import Axis, constant, nodes_of
from relax_disc.tir_kernels.cuda.threads import split
from relax_disc.tir_kernels.flat import INDEX, FlatBuffers, index_const
from relax_disc.tir_kernels.loops import group_extent, group_mapping, loop, sequence

_BYTES = 16  # of the widest load
# TVM 0.27 addresses vectors of truth values as bits, and packs those of bytes into integers.
_MOVED = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32", "uint64")

Body = Callable[[Any, dict[Any, Any]], Sequence[Any]]
"""``body(flat, mapping)``: statements of the element where ``mapping`` places the axes."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """Elements of collapsed axes, so many neighbours at a time.

    ``lanes``: neighbours, 4 or 8. ``is_aligned``: holds where all vectors of a launch are aligned;
    None: it always does.
    """

    lanes: int
    is_aligned: Any
    _extents: list[Any]
    _positions: list[Any]
    _statements: list[Any]

    def at(self, index: Any) -> list[Any]:
        """Compute the vector with a flat number."""
        indices = split(index, self._extents)
        binds = [tirx.Bind(var, at) for var, at in zip(self._positions, indices, strict=True)]
        return [*binds, *self._statements]

    def count(self, elements: Any) -> tuple[Any, Any]:
        """Return how many vectors of so many elements there are, and how many elements are left."""
        whole, none = elements // self.lanes, index_const(0)
        # Rows side by side are multiples.
        rest = elements % self.lanes if len(self._extents) == 1 else none
        if self.is_aligned is None:
            return whole, rest
        vectors = tirx.Select(self.is_aligned, whole, none)
        return vectors, tirx.Select(self.is_aligned, rest, elements)


def vectors_of(
    groups: Sequence[Sequence[Axis]],
    flat: FlatBuffers,
    body: Body,
    around: Mapping[Any, Any] | None = None,
) -> Vectors | None:
    """Make vectors of what ``body`` computes; None where nothing of it can be moved so.

    ``groups``: of `collapse`. ``around``: where ``body`` places other axes; the same elements go
    together at all these places, so that no sum depends on where its row lies.  Eight elements
    where some have 16 bits, otherwise four.
    """
    target = Target.current(allow_none=True)
    if target is not None and target.kind.name != "cuda":  # nothing runs code of ROCm here
        return None
    places = integers_of(list((around or {}).values()))
    made = (_vectors(groups, flat, body, places, lanes) for lanes in (8, 4))
    return next((vectors for vectors in made if vectors is not None), None)


def _vectors(
    groups: Sequence[Sequence[Axis]],
    flat: FlatBuffers,
    body: Body,
    places: Sequence[Any],
    lanes: int,
) -> Vectors | None:
    *outer, inner = groups
    extent = group_extent(inner)
    size = constant(extent)
    if size is not None and (size < lanes or (outer and size % lanes)):
        return None
    positions = [tirx.Var(f"at_{k}", INDEX) for k in range(len(groups))]
    neighbours = Neighbours(flat, [*positions, *places], lanes)
    mapping = _neighbour(groups, positions, lanes, neighbours.lane)
    statements = neighbours.around(body(neighbours, mapping))
    if not neighbours.moves:
        return None
    if outer:
        neighbours.require_multiple(extent)
    extents = vector_extents(groups, lanes)
    return Vectors(lanes, neighbours.is_aligned(), extents, positions, statements)


def vector_extents(groups: Sequence[Sequence[Axis]], lanes: int) -> list[Any]:
    """Extents of collapsed axes, so many neighbours of the last taken as one."""
    return [*map(group_extent, groups[:-1]), group_extent(groups[-1]) // lanes]


def at_vector(
    groups: Sequence[Sequence[Axis]],
    index: Any,
    lanes: int,
    lane: Any,
    body: Callable[[dict[Any, Any]], Sequence[Any]],
) -> list[Any]:
    """Run ``body(mapping)`` where ``mapping`` is neighbour ``lane`` of a vector with a number."""
    positions = [tirx.Var(f"at_{k}", INDEX) for k in range(len(groups))]
    places = split(index, vector_extents(groups, lanes))
    binds = [tirx.Bind(var, at) for var, at in zip(positions, places, strict=True)]
    return [*binds, *body(_neighbour(groups, positions, lanes, lane))]


def _neighbour(
    groups: Sequence[Sequence[Axis]], positions: Sequence[Any], lanes: int, lane: Any
) -> dict[Any, Any]:
    """Place collapsed axes at a neighbour of the vector whose number is the last position."""
    *outer, last = positions
    mapping: dict[Any, Any] = {}
    for group, position in zip(groups, [*outer, last * lanes + lane], strict=True):
        mapping.update(group_mapping(group, position))
    return mapping


class Neighbours(GuardDepth):
    """Stands for `FlatBuffers` in the code of one of several neighbouring elements.

    ``positions``: variables of which places are made, but for ``lane``, which is the neighbour's
    number.  Unless ``asks``, vectors that only a launch knows to be aligned are not moved as such.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        positions: Sequence[Any],
        lanes: int,
        lane: Any = None,
        asks: bool = True,
    ) -> None:
        self.lane = tirx.Var("lane", INDEX) if lane is None else lane
        self._flat, self._positions, self._lanes, self._asks = flat, positions, lanes, asks
        self._analyzer = tvm.sym.Analyzer()
        self._analyzer.bind(self.lane, Range(index_const(0), index_const(lanes)))
        # By buffer and place: the buffer, the place of the first neighbour, and the registers.
        self._read: dict[Any, tuple[Any, Any, Any]] = {}
        self._written: dict[Any, tuple[Any, Any, Any]] = {}
        self._multiples: dict[Any, Any] = {}  # what must be multiples of the lanes

    def rewrite(self, expr: Any, mapping: Mapping[Any, Any]) -> Any:
        """Replace variables and read parameters, as `FlatBuffers.rewrite`."""
        return rewrite_loads(expr, mapping, self._load, on_call=self._on_call)

    def store(self, buffer: Any, indices: Sequence[Any], value: Any) -> Any:
        """Write one element, converted to the buffer's type."""
        registers = self._registers(self._written, buffer, indices)
        if registers is None:
            return self._flat.store(buffer, indices, value)
        if str(value.ty.dtype) != str(buffer.dtype):
            value = tirx.Cast(str(buffer.dtype), value)
        return tirx.BufferStore(registers, value, [self.lane])

    @property
    def moves(self) -> bool:
        """Whether anything is moved 16 bytes at a time."""
        bits = {registers.dtype.bits for *_, registers in self._moved}
        return bool(bits) and (self._lanes < 8 or 16 in bits)

    @property
    def writes(self) -> bool:
        """Whether anything is written 16 bytes at a time."""
        return bool(self._written)

    @property
    def _moved(self) -> list[tuple[Any, Any, Any]]:
        return [*self._read.values(), *self._written.values()]

    def around(self, body: Sequence[Any]) -> list[Any]:
        """Put loads in front of the code of the neighbours, and stores behind it."""
        return [
            *(tirx.AllocBuffer(registers) for *_, registers in self._moved),
            *(self._move(*one, is_load=True) for one in self._read.values()),
            for_each(self.lane, self._lanes, body),
            *(self._move(*one, is_load=False) for one in self._written.values()),
        ]

    def require_multiple(self, number: Any) -> None:
        """Ask for a number that is a multiple of the lanes."""
        if constant(number) is None:
            self._multiples[tvm_ffi.StructuralKey(number)] = number

    def is_aligned(self) -> Any:
        """Return what must hold for the vectors to be aligned; None: nothing."""
        zero = index_const(0)
        conditions = [
            tirx.EQ(tirx.floormod(number, index_const(self._lanes)), zero)
            for number in self._multiples.values()
        ]
        return functools.reduce(tirx.And, conditions) if conditions else None

    def _load(self, buffer: Any, indices: Sequence[Any]) -> Any:
        # Behind a guard memory may end.
        registers = None if self.guards else self._registers(self._read, buffer, indices)
        if registers is None:
            return self._flat.load(buffer, indices)
        return tirx.BufferLoad(registers, [self.lane])

    def _on_call(self, call: Any, mutator: Any) -> Any:
        if not is_guard(call):
            return mutator.default_mutate(call)
        return self.mutate_guard(call, mutator)

    def _registers(
        self, known: dict[Any, tuple[Any, Any, Any]], buffer: Any, indices: Sequence[Any]
    ) -> Any:
        """Return where the neighbours' elements are held; None when they do not lie in order."""
        if not indices or str(buffer.dtype) not in _MOVED:
            return None
        address = FlatBuffers.address(buffer, indices)
        first = substitute(address, {self.lane: index_const(0)})
        key = (buffer, tvm_ffi.StructuralKey(address))
        if key not in known:
            if not self._lie_side_by_side(address, first):
                return None
            registers = tirx.decl_buffer(
                (self._lanes,), str(buffer.dtype), f"{buffer.name}_own", scope="local"
            )
            known[key] = (buffer, first, registers)
        return known[key][2]

    def _lie_side_by_side(self, address: Any, first: Any) -> bool:
        """Whether neighbours do, and begin at a multiple once `_multiples` are multiples."""
        if _names_floats(address) or not self._analyzer.can_prove_equal(address, first + self.lane):
            return False
        known = self._analyzer.modular_set(first)
        if known.coeff % self._lanes == 0 and known.base % self._lanes == 0:
            return True
        terms = tvm.sym.detect_linear_equation(first, self._positions)
        if not terms:
            return False
        terms = [self._analyzer.simplify(term) for term in terms]
        if any((constant(term) or 0) % self._lanes for term in terms):
            return False
        if not self._asks and any(constant(term) is None for term in terms):
            return False
        for term in terms:
            self.require_multiple(term)
        return True

    def _move(self, buffer: Any, first: Any, registers: Any, *, is_load: bool) -> Any:
        """Move the elements of all neighbours, 16 bytes at a time."""
        width = min(self._lanes, _BYTES * 8 // registers.dtype.bits)
        view, lanes = self._flat.view(buffer), index_const(self._lanes)
        # TVM 0.27 makes no vector of a place that it does not see to be a multiple.
        first = tirx.truncdiv(first, lanes) * lanes

        def move(start: int, k: Any) -> Any:
            there, here = [first + (k + start)], [k + start]
            if is_load:
                return tirx.BufferStore(registers, tirx.BufferLoad(view, there), here)
            return tirx.BufferStore(view, tirx.BufferLoad(registers, here), there)

        return sequence(
            [
                loop(
                    "part",
                    index_const(width),
                    lambda k, start=start: move(start, k),
                    tirx.ForKind.VECTORIZED,
                )
                for start in range(0, self._lanes, width)
            ]
        )


def for_each(lane: Any, lanes: int, body: Sequence[Any]) -> Any:
    """Run statements for each neighbour, of which ``lane`` is the number."""
    own = tirx.Var("lane", INDEX)  # of this loop alone
    return tirx.For(
        own,
        index_const(0),
        index_const(lanes),
        tirx.ForKind.UNROLLED,
        substitute(sequence(list(body)), {lane: own}),
        # By the compiler: TVM would write the code out so many times.
        annotations={"pragma_unroll_explicit": False},
    )


def rolled(statement: Any) -> Any:
    """Keep the compiler from unrolling the loop over what vectors leave: it would spill."""
    if not isinstance(statement, tirx.For):
        return statement
    return tirx.For(
        *(statement.loop_var, statement.min, statement.extent, statement.kind, statement.body),
        annotations={"disable_unroll": True},
    )


def _variables(expr: Any) -> list[Any]:
    return [var for var in nodes_of(tvm.ir.Var, expr) if isinstance(var.ty, tvm.ir.PrimType)]


def integers_of(expr: Any) -> list[Any]:
    """Whole numbers that are variables of an expression, or of several."""
    return list(dict.fromkeys(v for v in _variables(expr) if "int" in str(v.ty.dtype)))


def _names_floats(address: Any) -> bool:
    """Whether a place is made of a named value, which may be another for each neighbour."""
    return any("float" in str(var.ty.dtype) for var in _variables(address))
