"""Which reductions become one kernel with what follows them, and with each other; for CUDA.

A layer norm is a mean, a variance, a factor and a result: each a launch, where launches count.  Two
kinds of kernels are joined, on the graph of kernels after `FuseOps`.  *Rows*: reductions along the
last axes, and what is computed of each row with their results.  *Columns*: reductions along the
first axes, and what is computed of each column's.  All that a join reads is there when the first
of it could run, so nothing waits for it; what it writes is what its kernels wrote.  Producers of
what it reads stay apart: a value that is kept for the backward pass anyway is a better source than
two that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import tvm
import tvm_ffi
from tvm import relax, tirx

from relax_disc.analysis.kernels.element import substitute
from relax_disc.ops.operand_views import operands_of
from relax_disc.transform.fusion.kernel_graph import (
    Join,
    KernelGraph,
    calls_of,
    dims_of,
    sizes_are_dims,
    union,
)
from relax_disc.transform.fusion.producers import INJECTIVE, REDUCTION, pattern_of

_MOST_KERNELS = 8
# What is computed much later than a reduction is made then, so that it need not lie in memory.
_NEAR = 12

_Direction = Literal["row", "column"]


def find_chains(
    mod: tvm.IRModule,
    function: relax.Function,
    block: Any,
    is_refused: Callable[[list[relax.Var]], bool],
) -> list[Join]:
    """Find the reductions of a block that are worth joining.

    ``mod``: after `FuseOps`, before `FuseTIR`. ``is_refused``: whether the kernels that make some
    values are not to become one.
    """
    found = _Finder(mod, function, list(block.bindings)).joins()
    made = (([block.bindings[place].var for place in join.places], join) for join in found)
    return [join for values, join in made if not is_refused(values)]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel with one result: its place, and the sizes of that but for ones."""

    place: int
    sizes: tuple[Any, ...]
    # of a reduction: the sizes that are left, and whether they are the first or the last
    kept: tuple[Any, ...] = ()
    direction: _Direction | None = None


class _Finder(KernelGraph):
    def __init__(
        self, mod: tvm.IRModule, function: relax.Function, bindings: list[relax.Binding]
    ) -> None:
        super().__init__(mod, function, bindings)
        kernels = (self._kernel(place) for place in range(len(bindings)))
        self._kernels = {kernel.place: kernel for kernel in kernels if kernel is not None}
        self._joined: set[int] = set()

    def joins(self) -> list[Join]:
        """Choose; every kernel is in one join at most."""
        found = []
        for kernel in self._kernels.values():
            if kernel.direction is None or kernel.place in self._joined:
                continue
            join = Join([kernel.place])
            while any(self._try_to_add(join, kernel, p) for p in self._candidates(join)):
                pass
            if len(join.places) > 1 and self._knows_its_sizes(join):
                found.append(join)
        return found

    def _knows_its_sizes(self, join: Join) -> bool:
        """Whether all dims of a join are whole sizes of what it reads."""
        made = [self._bindings[place].var for place in join.places]
        read = [x for place in join.places for x in operands_of(self._bindings[place].value)]
        arguments = [x for x in read if x not in made]
        return all(sizes_are_dims(arguments, value) for value in made)

    def _kernel(self, place: int) -> _Kernel | None:
        binding = self._bindings[place]
        if place in self._views or not isinstance(binding.value, relax.Call):
            return None
        parts = calls_of(self._mod, binding.value)
        patterns = [pattern_of(self._mod, part) for part in parts]
        if not parts or max(patterns) > REDUCTION:
            return None
        # What is returned may be written over a parameter, whose readers then have to come before;
        # a sum is not.
        if patterns[-1] != REDUCTION and self._is_returned(binding.var):
            return None
        sizes = _sizes(binding.var)
        if all(pattern <= INJECTIVE for pattern in patterns):
            return _Kernel(place, sizes)
        (reduction, *others) = (
            part for part, kind in zip(parts, patterns, strict=True) if kind == REDUCTION
        )
        if others:
            return None
        kept, direction = self._direction(binding.value, reduction)
        return None if direction is None else _Kernel(place, sizes, kept, direction)

    def _direction(
        self, call: relax.Call, reduction: relax.Call
    ) -> tuple[tuple[Any, ...], _Direction | None]:
        """Return the sizes that a reduction keeps, and which of its operand's they are."""
        kept = _sizes_of(reduction.ty_args[0].shape)
        found: set[_Direction] = set()
        for operand in operands_of(reduction):
            sizes = _sizes(operand)
            if len(sizes) <= len(kept):
                continue
            if _same(sizes[: len(kept)], kept):
                found.add("row")
            if _same(sizes[-len(kept) :], kept):
                found.add("column")
        if len(found) != 1 or not kept:
            return (), None
        if isinstance(call.op, tvm.ir.GlobalVar):
            dims = dims_of(self._mod[call.op], call)
            kept = tuple(substitute(size, dims) for size in kept)
        return kept, found.pop()

    def _candidates(self, join: Join) -> Iterator[int]:
        """Readers of what a join makes; other reductions of what it reads."""
        made = [self._bindings[place].var for place in join.places]
        read = {
            self._stored_of(operand)
            for place in join.places
            for operand in operands_of(self._bindings[place].value)
        }
        places = set(chain.from_iterable(self._readers.get(value, ()) for value in [*made, *read]))
        for place in sorted(places.difference(join.places)):
            kernel = self._kernels.get(place)
            is_near = place <= join.places[-1] + _NEAR and place > join.places[0]
            if kernel is not None and is_near and place not in self._joined:
                follows = any(x in made for x in operands_of(self._bindings[place].value))
                if follows or kernel.direction is not None:
                    yield place

    def _try_to_add(self, join: Join, first: _Kernel, place: int) -> bool:
        kernel = self._kernels[place]
        if len(join.places) == _MOST_KERNELS or not _fits(kernel, first):
            return False
        made = {self._bindings[p].var for p in join.places}
        before = union(self._before[p] for p in join.places)
        mine = [x for x in operands_of(self._bindings[place].value) if x not in made]
        if before >> place & 1 or not self._are_made(mine, before):
            return False
        theirs = [x for p in join.places for x in operands_of(self._bindings[p].value)]
        if not self._are_made([x for x in theirs if x not in made], self._before[place]):
            return False
        join.places[:] = sorted([*join.places, place])
        self._joined.update(join.places)
        self._needs_all(join.places, before | self._before[place])
        return True

    def _are_made(self, values: list[relax.Var], before: int) -> bool:
        """Whether values are there, some bindings having run."""
        stored = map(self._stored_of, values)
        return all(before >> self._place[x] & 1 for x in stored if x in self._place)


def _fits(kernel: _Kernel, first: _Kernel) -> bool:
    if kernel.direction is not None:
        return kernel.direction == first.direction and _same(kernel.kept, first.kept)
    if first.direction == "column":
        return _same(kernel.sizes, first.kept)
    return _same(kernel.sizes[: len(first.kept)], first.kept)


def _sizes(value: relax.Var) -> tuple[Any, ...]:
    return _sizes_of(getattr(value.ty, "shape", None))


def _sizes_of(shape: Any) -> tuple[Any, ...]:
    values = shape.values if isinstance(shape, relax.ShapeExpr) else ()
    return tuple(x for x in values if not (isinstance(x, tirx.IntImm) and int(x.value) == 1))


def _same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(map(tvm_ffi.structural_equal, left, right))
