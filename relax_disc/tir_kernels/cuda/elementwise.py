"""CUDA rule: kernels without reductions run as one launch, an element of each output a thread.

Producers are inlined; outputs over one domain are computed together, all reads before all writes,
as in the CPU's rule of that name.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.analysis.kernels.element import Element, Inliner, collapse
from relax_disc.analysis.kernels.stages import constant, read_stages
from relax_disc.tir_kernels.cpu.elementwise import emit_element, same_domain, unit_mapping
from relax_disc.tir_kernels.cuda.threads import at_groups, elements_count, launch, only_where
from relax_disc.tir_kernels.flat import FlatBuffers, index_const
from relax_disc.tir_kernels.loops import with_body

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
        launches = [
            _launch(inliner.elements(together), flat)
            for together in same_domain(inliner.remaining(kernel))
        ]
        return with_body(func, [*flat.declarations(), *launches])


def _launch(elements: list[Element], flat: FlatBuffers) -> Any:
    stage = elements[0].stage
    axes = [axis for axis in stage.axes if constant(axis.extent) != 1]
    unit = unit_mapping(stage)
    if not axes:
        return launch(index_const(1), 1, lambda *_: [emit_element(elements, flat, unit)])
    expressions = [expr for element in elements for expr in element.expressions]
    stores = [[element.stage.buffer, *element.stage.indices] for element in elements]
    groups = collapse(axes, expressions, stores)
    total = elements_count(groups)

    def body(block: Any, thread: Any) -> list[Any]:
        index = block * _THREADS + thread

        def element(mapping: dict[Any, Any]) -> list[Any]:
            return [emit_element(elements, flat, {**unit, **mapping})]

        return [only_where(index < total, at_groups(groups, index, "element", element))]

    return launch((total + (_THREADS - 1)) // _THREADS, _THREADS, body)
