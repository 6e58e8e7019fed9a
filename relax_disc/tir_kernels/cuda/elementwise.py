"""CUDA rule: kernels without reductions run as one launch, an element of each output a thread.

Producers are inlined; outputs over one domain are computed together, all reads before all writes,
as in the CPU's rule of that name.  Outputs over several domains of fixed sizes are one launch as
well: each has blocks of its own.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import Element, Inliner, collapse
from relax_disc.analysis.kernels.stages import constant, read_stages
from relax_disc.tir_kernels.cpu.elementwise import APART, emit_element, same_domain, unit_mapping
from relax_disc.tir_kernels.cuda.threads import at_groups, elements_count, launch, only_where
from relax_disc.tir_kernels.flat import FlatBuffers, index_const, product
from relax_disc.tir_kernels.loops import sequence, with_body

_THREADS = 256


class Elementwise:
    """Schedule rule for kernels without reductions."""

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool = False
    ) -> s_tir.Schedule | None:
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
        domains = [inliner.elements(x) for part in parts for x in same_domain(part)]
        counts = [_blocks_of(elements) for elements in domains]
        if len(domains) == 1 or None in counts:
            launches = [_launch(elements, flat) for elements in domains]
        else:
            launches = [_switch(domains, [count or 0 for count in counts], flat)]
        return with_body(func, [*flat.declarations(), *launches])


def _blocks_of(elements: list[Element]) -> int | None:
    """Blocks that elements of a domain take; None where its sizes are not fixed."""
    total = constant(product([axis.extent for axis in elements[0].stage.axes]))
    return None if total is None else -(-total // _THREADS)


def _switch(domains: list[list[Element]], counts: list[int], flat: FlatBuffers) -> Any:
    """Launch blocks for all domains, side by side."""
    starts = [0, *accumulate(counts)]

    def body(block: Any, thread: Any) -> list[Any]:
        def among(first: int, last: int) -> list[Any]:
            """Find the domain of a block by halves."""
            if last - first == 1:
                return _body(domains[first], flat, block - starts[first], thread)
            middle = (first + last) // 2
            halves = (sequence(among(*part)) for part in ((first, middle), (middle, last)))
            return [tirx.IfThenElse(block < starts[middle], *halves)]

        return among(0, len(domains))

    return launch(index_const(starts[-1]), _THREADS, body)


def _launch(elements: list[Element], flat: FlatBuffers) -> Any:
    if all(constant(axis.extent) == 1 for axis in elements[0].stage.axes):
        unit = unit_mapping(elements[0].stage)
        return launch(index_const(1), 1, lambda *_: [emit_element(elements, flat, unit)])
    total = product([axis.extent for axis in elements[0].stage.axes])
    return launch(
        (total + (_THREADS - 1)) // _THREADS,
        _THREADS,
        lambda block, thread: _body(elements, flat, block, thread),
    )


def _body(elements: list[Element], flat: FlatBuffers, block: Any, thread: Any) -> list[Any]:
    """Compute the elements of a domain that are a thread's in the domain's n-th block."""
    stage = elements[0].stage
    axes = [axis for axis in stage.axes if constant(axis.extent) != 1]
    unit = unit_mapping(stage)
    index = block * _THREADS + thread
    if not axes:
        return [only_where(index < 1, [emit_element(elements, flat, unit)])]
    expressions = [expr for element in elements for expr in element.expressions]
    stores = [[element.stage.buffer, *element.stage.indices] for element in elements]
    groups = collapse(axes, expressions, stores)

    def element(mapping: dict[Any, Any]) -> list[Any]:
        return [emit_element(elements, flat, {**unit, **mapping})]

    within = index < elements_count(groups)
    return [only_where(within, at_groups(groups, index, "element", element))]
