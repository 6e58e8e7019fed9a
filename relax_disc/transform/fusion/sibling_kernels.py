"""Which kernels of a program read the same values and may become one; used by `FuseKernels`.

Two choices, both on the graph of kernels after `FuseOps`.  *Siblings* are element-wise kernels over
one shape that read a large value in common, do not depend on each other and can run as soon as each
other: as one kernel with several results they read it once (sibling fusion of XLA's multi-output
fusion).  A joined kernel, or a single one, may also *make again* what an earlier kernel made of
values that it reads anyway, for readers that come after it: of ``silu(gate) * up`` in a
transformer's feed-forward, the product with the next weight needs it in the forward pass, that
weight's gradient in the backward pass.  Made again by the kernel of the gradients of ``gate`` and
``up``, it costs one more write there, and is not kept in between.  What a kernel writes is no more
than what dies in it, of siblings each for itself, so that no more is live after it than before;
only operands that are small beside the values do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from relax_disc.analysis.symbolic.comparison.compare import at_most
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.ops.operand_views import operands_of
from relax_disc.transform.fusion.kernel_graph import (
    Copy,
    Join,
    KernelGraph,
    calls_of,
    sizes_are_dims,
    union,
)
from relax_disc.transform.fusion.producers import (
    INJECTIVE,
    MOST_WORK,
    bytes_of,
    is_small_beside,
    pattern_of,
    work_of,
)

_MOST_RESULTS = 4
# Between the last reader before and the kernel that makes a value again there are so many bindings
# at least; else it is not worth the write.
_FAR = 8


def find_joins(mod: tvm.IRModule, function: relax.Function, block: Any) -> list[Join]:
    """Find the kernels of a block that are worth joining.

    ``mod``: after `FuseOps`, before `FuseTIR`.
    """
    return _Finder(mod, function, list(block.bindings)).joins()


@dataclass(frozen=True, slots=True)
class _Kernel:
    """An element-wise kernel: its place, and the large values that it reads."""

    place: int
    value: relax.Var
    large: frozenset[relax.Var]


class _Finder(KernelGraph):
    def __init__(
        self, mod: tvm.IRModule, function: relax.Function, bindings: list[relax.Binding]
    ) -> None:
        super().__init__(mod, function, bindings)
        kernels = (self._kernel(place) for place in range(len(bindings)))
        self._kernels = {kernel.place: kernel for kernel in kernels if kernel is not None}
        self._join_of: dict[int, Join] = {}

    def joins(self) -> list[Join]:
        """Choose; every kernel is in one join at most."""
        for kernel in self._kernels.values():
            for sibling in self._siblings(kernel):
                self._try_to_join(kernel, sibling)
        for kernel in self._kernels.values():
            join = self._join_of.get(kernel.place, Join([kernel.place]))
            if kernel.place == join.places[-1]:
                self._make_again(join)
        return list(dict.fromkeys(self._join_of.values()))

    def _kernel(self, place: int) -> _Kernel | None:
        """Describe an element-wise kernel with one result; None for anything else."""
        binding = self._bindings[place]
        if place in self._views or not isinstance(binding.value, relax.Call):
            return None
        parts = calls_of(self._mod, binding.value)
        if not parts or any(pattern_of(self._mod, part) > INJECTIVE for part in parts):
            return None
        if bytes_of(binding.var) is None or self._is_returned(binding.var):
            return None
        operands = operands_of(binding.value)
        if not sizes_are_dims(operands, binding.var):
            return None
        large = {x for x in operands if not is_small_beside(x, binding.var)}
        return _Kernel(place, binding.var, frozenset(map(self._stored_of, large)))

    def _readers_of(self, values: Iterable[relax.Var]) -> set[int]:
        return set().union(*(self._readers.get(value, ()) for value in values))

    def _siblings(self, kernel: _Kernel) -> Iterator[_Kernel]:
        """Later kernels over the same shape that read a large value in common, in order."""
        for place in sorted(self._readers_of(kernel.large)):
            other = self._kernels.get(place)
            if other is not None and place > kernel.place and _same_type(kernel, other):
                yield other

    def _try_to_join(self, kernel: _Kernel, other: _Kernel) -> None:
        join = self._join_of.get(kernel.place, Join([kernel.place]))
        is_taken = other.place in self._join_of
        if is_taken or len(join.places) == _MOST_RESULTS:
            return
        if not all(self._are_ready_together(place, other.place) for place in join.places):
            return
        places = [*join.places, other.place]
        if all(self._frees_as_much(place, places) for place in places):
            for place in places:
                self._join_of[place] = join
            join.places[:] = places
            self._needs_all(places, union(self._before[place] for place in places))

    def _frees_as_much(self, place: int, places: list[int]) -> bool:
        """Whether more dies with a kernel than without it, by what it writes: it need not wait."""
        value, rest = self._kernels[place].value, [p for p in places if p != place]
        return at_most(_total([value, *self._dying(rest)]), _total(self._dying(places)))

    def _dying(self, places: list[int]) -> list[relax.Var]:
        """Large values that nothing reads after some kernels and what they need."""
        needed = union(self._before[p] | 1 << p for p in places)
        read = frozenset().union(*(self._kernels[place].large for place in places))
        return [
            value
            for value in read - self._escaping
            if value in self._place and all(needed >> p & 1 for p in self._readers[value])
        ]

    def _make_again(self, join: Join) -> None:
        """Let a kernel make what an earlier one made of values that it reads."""
        first = self._kernels[join.places[0]]
        read = frozenset().union(*(self._kernels[place].large for place in join.places))
        for place in sorted(self._readers_of(read)):
            made = self._kernels.get(place)
            if made is None or place in self._join_of or not made.large or not made.large <= read:
                continue
            if len(join.places) + len(join.again) == _MOST_RESULTS:
                return
            readers = self._late_readers(join, made) if _same_type(first, made) else None
            copied = [place, *(copy.place for copy in join.again)]
            written = [self._kernels[p].value for p in (*join.places, *copied)]
            fits = at_most(_total(written), _total(self._dying(join.places)))
            if readers and fits and self._is_cheap(place):
                join.again.append(Copy(place, readers, self._views_of(made.value, readers)))
                self._readers[made.value] = self._readers[made.value] - readers
                self._join_of.update(dict.fromkeys(join.places, join))
                before = self._before[join.places[0]] | union(1 << p for p in join.places)
                for reader in readers:
                    self._needs_all([reader], self._before[reader] | before)

    def _views_of(self, value: relax.Var, readers: frozenset[int]) -> tuple[int, ...]:
        """Reshapes of a value through which bindings read it, in order."""
        wanted = {x for place in readers for x in operands_of(self._bindings[place].value)}
        found: list[int] = []
        for place in sorted(self._views, reverse=True):
            binding = self._bindings[place]
            if binding.var in wanted and self._stored[binding.var].same_as(value):
                wanted.update(operands_of(binding.value))
                found.insert(0, place)
        return tuple(found)

    def _is_cheap(self, place: int) -> bool:
        parts = calls_of(self._mod, self._bindings[place].value)
        return sum(work_of(self._mod, part) for part in parts) <= MOST_WORK

    def _late_readers(self, join: Join, made: _Kernel) -> frozenset[int] | None:
        """Readers of a value that can wait for a kernel; None where it is needed at the kernel."""
        needed = self._before[join.places[0]]
        readers = self._readers.get(made.value, set())
        early = {place for place in readers if needed >> place & 1}
        late = frozenset(readers - early)
        if made.value in self._escaping or not early or late & self._kernels.keys():
            return None
        if join.places[0] - max(early) < _FAR:
            return None
        return late if all(self._can_wait(place, join, made, late) for place in late) else None

    def _can_wait(self, place: int, join: Join, made: _Kernel, late: frozenset[int]) -> bool:
        """Whether all else that a kernel reads is there after another in any case.

        Or just before it, beside all that the other reads: when the last of that is made.
        """
        if not isinstance(self._bindings[place].value, relax.Call):
            return False
        read = set().union(*(self._kernels[p].large for p in join.places))
        makers = {self._place[value] for value in read if value in self._place}
        return all(
            stored.same_as(made.value)
            or stored not in self._place
            or stored in self._escaping
            or is_small_beside(stored, made.value)
            or makers & self._readers[stored]
            or self._follows((self._readers[stored] - late) | {self._place[stored]}, join)
            for stored in map(self._stored_of, operands_of(self._bindings[place].value))
        )

    def _follows(self, places: set[int], join: Join) -> bool:
        """Whether one of several bindings needs a kernel."""
        return any(self._before[place] >> p & 1 for place in places for p in join.places)


def _same_type(kernel: _Kernel, other: _Kernel) -> bool:
    return bool(tvm_ffi.structural_equal(kernel.value.ty, other.value.ty))


def _total(values: Iterable[relax.Var]) -> SymbolicExpr | None:
    total = SymbolicExpr.constant(0)
    for value in values:
        size = bytes_of(value)
        if size is None:
            return None
        total = total + size
    return total
