"""What reading a Relax function fills in: buffers, views of them, kernels, the result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import relax

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.analysis.symbolic.from_tirx import from_tirx
from relax_disc.errors import GraphError, RelaxDiscError
from relax_disc.ops.registry import dtype_name, itemsize
from relax_disc.vm_builtins.plan_metadata import Storage


class NotPlannableError(RelaxDiscError):
    """A function has something that an arena plan cannot hold; stock passes must lower it."""


@dataclass(slots=True)
class Buffer:
    """A piece of memory while the table is being built."""

    name: str
    bytes: SymbolicExpr
    storage: Storage = Storage.ARENA
    given: int = -1
    begin: int = -1  # byte at which a part of the given tensor begins; -1: all of it


@dataclass(frozen=True, slots=True)
class View:
    """A buffer seen with a type and a shape."""

    buffer: int
    dtype: str
    shape: tuple[SymbolicExpr, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """New values of all rows of a given tensor, in parts: views, in order."""

    parts: tuple[int, ...]


@dataclass(slots=True)
class KernelCall:
    """One kernel while the table is being built; views and buffers by index."""

    name: str
    callee: relax.Expr
    arguments: list[tuple[str, Any]]
    inputs: list[int]
    outputs: list[int]
    inplace: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    after: set[int] = field(default_factory=set)
    flops: SymbolicExpr = field(default_factory=SymbolicExpr)
    workspace: tuple[str, tuple[SymbolicExpr, ...]] = ("", ())
    recomputable: bool = True
    may_rerun: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True)
class CountCheck:
    """What dims must fulfil once all of them have been counted."""

    size: SymbolicExpr
    relation: str  # "<=" or "!="
    limit: SymbolicExpr
    message: str  # what the model does or needs

    @property
    def dims(self) -> list[str]:
        """Names of the dims that it mentions."""
        return sorted({dim.name for expr in (self.size, self.limit) for dim in expr.free_dims})


class FunctionTable:
    """Everything that one walk over a function finds.

    ``name``: the function's name. ``dims``: the free variables of the parameters' shapes, in the
    order of first appearance. ``buffers``, ``views``, ``kernels``: the tables. ``given``: what the
    caller passes: parameters first, then constants. ``result``: the returned structure: a view's
    index, `Joined`, a tuple of structures, or a Relax expression that holds no tensor.
    ``candidates``: buffers marked by ``relax_disc.evict``. ``late``: given buffers that the caller
    has only once it has the early results. ``values``: what every variable stands for, as in
    `result`.
    ``counted``: of the dims that the function counts itself, the first kernel that does.
    ``count_checks``: what those must fulfil.
    ``parameter_given``: index of a parameter -> index in `given` of its (first) tensor.
    """

    def __init__(self, name: str, dims: dict[Any, SymbolicDim]) -> None:
        self.name = name
        self.dims = dims
        self.meanings: dict[Any, Any] = dict(dims)  # also of variables that a match_cast names
        self.buffers: list[Buffer] = []
        self.views: list[View] = []
        self.kernels: list[KernelCall] = []
        self.given: list[relax.Expr] = []
        self.result: Any = None
        self.candidates: set[int] = set()
        self.late: set[int] = set()
        self.counted: dict[str, int] = {}
        self.count_checks: tuple[CountCheck, ...] = ()
        self.values: dict[relax.Expr, Any] = {}
        self.parameter_given: dict[int, int] = {}
        self._view_index: dict[View, int] = {}
        self._sizes: dict[Any, SymbolicExpr] = {}
        self._kinds: dict[Any, tuple[str, tuple[SymbolicExpr, ...], SymbolicExpr]] = {}

    def expr(self, value: Any) -> SymbolicExpr:
        """Turn a TVM integer into an expression over the dims.

        Raises `NotPlannableError`: it is no arithmetic of the parameters' shapes.
        """
        key = tvm_ffi.StructuralKey(value)  # of the same few sizes every buffer is made
        if key not in self._sizes:
            self._sizes[key] = self._expr(value)
        return self._sizes[key]

    def _expr(self, value: Any) -> SymbolicExpr:
        try:
            result = from_tirx(value, self.meanings)
        except GraphError as error:
            raise NotPlannableError(f"{self.name}: {error}") from error
        known = {dim.name for dim in self.dims.values()}
        unknown = [dim.name for dim in result.free_dims if dim.name not in known]
        if unknown:
            raise NotPlannableError(
                f"{self.name}: dim {unknown[0]} is known only while the function runs"
            )
        return result

    def add_buffer(self, name: str, kind: Any, **storage: Any) -> int:
        """Add memory for a tensor of a type; return the index of its view."""
        if not isinstance(kind.shape, relax.ShapeExpr):
            raise NotPlannableError(f"{self.name}: the shape of {name} is not known")
        key = tvm_ffi.StructuralKey(kind)
        if key not in self._kinds:
            dtype = dtype_name(kind)
            shape = tuple(self.expr(extent) for extent in kind.shape.values)
            size = SymbolicExpr.constant(itemsize(dtype))
            for extent in shape:
                size = size * extent
            self._kinds[key] = dtype, shape, size
        dtype, shape, size = self._kinds[key]
        self.buffers.append(Buffer(name, size, **storage))
        return self.view(len(self.buffers) - 1, dtype, shape)

    def view(self, buffer: int, dtype: str, shape: Iterable[SymbolicExpr]) -> int:
        """Index of a view, which is added if it is new."""
        view = View(buffer, dtype, tuple(shape))
        if view not in self._view_index:
            self._view_index[view] = len(self.views)
            self.views.append(view)
        return self._view_index[view]

    def given_buffers(self) -> dict[int, int]:
        """Buffers of the given tensors as wholes, by index of the given tensor."""
        return {
            buffer.given: index
            for index, buffer in enumerate(self.buffers)
            if buffer.storage is Storage.GIVEN and buffer.begin < 0
        }

    def part_of(self, given: int, begin: int) -> int:
        """Buffer of the part of a given tensor that begins at a byte."""
        return next(
            index
            for index, buffer in enumerate(self.buffers)
            if buffer.storage is Storage.GIVEN and (buffer.given, buffer.begin) == (given, begin)
        )

    def readers(self) -> dict[int, list[int]]:
        """Kernels that read each buffer, in program order."""
        found: dict[int, list[int]] = {}
        for k, kernel in enumerate(self.kernels):
            for buffer in dict.fromkeys(kernel.inputs):
                found.setdefault(buffer, []).append(k)
        return found

    def flat_result(self) -> list[Any]:
        """Return the leaves of the returned structure, in order."""
        return list(leaves(self.result))


def leaves(structure: Any) -> Iterable[Any]:
    """Yield the leaves of nested tuples."""
    if isinstance(structure, tuple):
        for part in structure:
            yield from leaves(part)
    else:
        yield structure
