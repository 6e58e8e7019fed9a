"""CUDA rule: kernels without reductions run as one launch, a vector of each output a thread.

Producers are inlined; outputs over one domain are computed together, all reads before all writes,
as in the CPU's rule of that name.  Outputs over several domains of fixed sizes are one launch as
well: each has blocks of its own.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from tvm import tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import Element, Inliner, collapse
from relax_disc.analysis.kernels.stages import constant, read_stages
from relax_disc.tir_kernels.cpu.elementwise import APART, emit_element, same_domain, unit_mapping
from relax_disc.tir_kernels.cuda.threads import at_groups, elements_count, launch, only_where
from relax_disc.tir_kernels.cuda.vectors import rolled, vectors_of
from relax_disc.tir_kernels.flat import FlatBuffers, index_const
from relax_disc.tir_kernels.loops import Scheduled, loop, sequence, with_body

_THREADS = 256


class Elementwise:
    """Schedule rule for kernels without reductions."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Scheduled:
        """Return the scheduled kernel, or None when it is another rule's."""
        kernel = read_stages(func)
        if kernel is None or any(stage.combiner is not None for stage in kernel.stages):
            return None
        inliner = Inliner(kernel, inline_outputs=True)
        if not inliner.inlinable:
            return None
        flat = FlatBuffers()
        outputs = inliner.remaining(kernel)
        ends = list(accumulate(int(count) for count in (func.attrs or {}).get(APART, ())))
        parts = [outputs[a:b] for a, b in pairwise([0, *ends])] if ends else [outputs]
        domains = [_Domain(inliner.elements(x), flat) for part in parts for x in same_domain(part)]
        counts = [constant(domain.blocks) for domain in domains]
        if len(domains) == 1 or None in counts:
            launches = [domain.launch() for domain in domains]
        else:
            launches = [_switch(domains, [count or 0 for count in counts])]
        return with_body(func, [*flat.declarations(), *launches])


class _Domain:
    """Elements over the same axes, which are dealt out to threads.

    ``blocks``: how many blocks they take.
    """

    def __init__(self, elements: list[Element], flat: FlatBuffers) -> None:
        self._elements, self._flat = elements, flat
        stage = elements[0].stage
        self._unit = unit_mapping(stage)
        axes = [axis for axis in stage.axes if constant(axis.extent) != 1]
        expressions = [expr for element in elements for expr in element.expressions]
        stores = [[element.stage.buffer, *element.stage.indices] for element in elements]
        self._groups = collapse(axes, expressions, stores) if axes else []
        self._vectors = vectors_of(self._groups, flat, self._emit) if axes else None
        self._count = elements_count(self._groups)
        own = _THREADS * (self._vectors.lanes if self._vectors else 1)
        self.blocks = (self._count + (own - 1)) // own

    def launch(self) -> Any:
        """Launch all blocks."""
        if not self._groups:
            return launch(index_const(1), 1, lambda *_: self._emit(self._flat, {}))
        return launch(self.blocks, _THREADS, self.body)

    def body(self, block: Any, thread: Any) -> list[Any]:
        """Compute what is a thread's in the n-th block."""
        index = block * _THREADS + thread
        if self._vectors is None:
            return [self._scalar(index)]
        vectors, rest = self._vectors.count(self._count)
        statements = [only_where(index < vectors, self._vectors.at(index))]
        if constant(rest) != 0:
            # Fewer than a block has, or everything: neighbouring threads have neighbours.
            lanes = self._vectors.lanes
            aligned = self._vectors.is_aligned
            first, threads = vectors * lanes + index, self.blocks * _THREADS
            turns = (
                1 if aligned is None else tirx.Select(aligned, index_const(1), index_const(lanes))
            )
            left = loop("turn", turns, lambda turn: self._scalar(first + turn * threads))
            statements.append(rolled(left))
        return statements

    def _scalar(self, index: Any) -> Any:
        def emit(mapping: dict[Any, Any]) -> list[Any]:
            return self._emit(self._flat, mapping)

        if not self._groups:
            return only_where(index < 1, emit({}))
        return only_where(index < self._count, at_groups(self._groups, index, "element", emit))

    def _emit(self, flat: Any, mapping: dict[Any, Any]) -> list[Any]:
        return [emit_element(self._elements, flat, {**self._unit, **mapping})]


def _switch(domains: list[_Domain], counts: list[int]) -> Any:
    """Launch blocks for all domains, side by side."""
    starts = [0, *accumulate(counts)]

    def body(block: Any, thread: Any) -> list[Any]:
        def among(first: int, last: int) -> list[Any]:
            """Find the domain of a block by halves."""
            if last - first == 1:
                return domains[first].body(block - starts[first], thread)
            middle = (first + last) // 2
            halves = (sequence(among(*part)) for part in ((first, middle), (middle, last)))
            return [tirx.IfThenElse(block < starts[middle], *halves)]

        return among(0, len(domains))

    return launch(index_const(starts[-1]), _THREADS, body)
