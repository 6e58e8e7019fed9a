"""Reductions of few, long rows or columns, each split over blocks whose results a launch adds up.

The number of parts is fixed when the kernel is made, so that the order of a sum depends on its
length alone.  Short ones stay one launch: the host chooses, by the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tvm import tirx

from relax_disc.analysis.kernels.element import Element
from relax_disc.analysis.kernels.stages import Axis, constant, loads_of
from relax_disc.tir_kernels.cpu.reductions import RowKernel
from relax_disc.tir_kernels.flat import INDEX, index_const, product
from relax_disc.tir_kernels.loops import sequence

# Blocks of 512 threads that keep a large device busy, by bytes of a load. A thread has four in
# flight: 2 or 3 MiB together, about what an H100's memory moves while a load takes.
_BLOCKS = {4: 256, 16: 96}
_STEPS = 32  # that a thread makes alone before a second launch is worth its time

Launch = Callable[..., Any]
"""``launch(kernel, part=None, parts=1, totals=False)``: a launch of a kernel, or of a part of it.

``totals``: of a kernel that adds up parts.
"""


def split_long(
    kernel: RowKernel,
    blocks: int | None,
    turns: int,
    most_parts: int,
    launch: Launch,
    load_bytes: int = 4,
) -> tuple[list[Any], list[Any]]:
    """Make the launches of a kernel, and the buffers that they need.

    ``blocks``: of the kernel in one launch. ``turns``: threads that take turns along a row.
    """
    whole = launch(kernel)
    parts = 1
    while blocks is not None and parts < most_parts and blocks * parts < _BLOCKS[load_bytes]:
        parts *= 2
    reductions = [element for element in kernel.elements if element.stage.combiner is not None]
    length = _longest([product([x.extent for x in e.stage.reduced]) for e in reductions])
    limit = _STEPS * turns
    size = constant(length)
    is_short = size is not None and size <= limit
    if parts == 1 or is_short or not _are_apart(kernel, reductions):
        return [whole], []
    part = tirx.Var("part", INDEX)
    extents = [axis.extent for axis in kernel.rows]
    partials = [
        tirx.decl_buffer((parts, *extents), str(e.stage.init.ty.dtype), f"{e.stage.name}_parts")
        for e in reductions
    ]
    rows = [axis.var for axis in kernel.rows]
    found = dict(zip(reductions, partials, strict=True))
    first = replace(
        kernel,
        kernel=replace(kernel.kernel, outputs=tuple(partials)),
        elements=tuple(_partial(e, buffer, (part, *rows)) for e, buffer in found.items()),
    )
    second = replace(
        kernel,
        elements=tuple(
            _total(e, found[e], parts, rows) if e in found else e for e in kernel.elements
        ),
    )
    launches = [launch(first, part, parts), launch(second, totals=True)]
    if size is not None:
        return launches, partials
    return [tirx.IfThenElse(length > limit, sequence(launches), whole)], partials


def _longest(lengths: Sequence[Any]) -> Any:
    longest = lengths[0]
    for length in lengths[1:]:
        longest = tirx.max(longest, length)
    return longest


def _are_apart(kernel: RowKernel, reductions: Sequence[Element]) -> bool:
    """Whether reductions read nothing that the kernel makes, and all else is a number a row."""
    made = {element.stage.buffer for element in kernel.elements}
    rows = {axis.var for axis in kernel.rows}
    return not any(
        load.source in made for e in reductions for expr in e.expressions for load in loads_of(expr)
    ) and all(
        x.var in rows or constant(x.extent) == 1 for e in kernel.elements for x in e.stage.spatial
    )


def _partial(element: Element, buffer: Any, indices: tuple[Any, ...]) -> Element:
    return replace(element, stage=replace(element.stage, buffer=buffer, indices=indices))


def _total(element: Element, partial: Any, parts: int, rows: Sequence[Any]) -> Element:
    """Add up the parts of a reduction, in their order."""
    axis = Axis(tirx.Var("part", INDEX), index_const(parts), True)
    value = tirx.BufferLoad(partial, [axis.var, *rows])
    stage = replace(element.stage, axes=(*element.stage.spatial, axis), value=value, lets=())
    return Element(stage, (), value)
