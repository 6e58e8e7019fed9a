"""Diagonals and triangles of matrices."""

from __future__ import annotations

from typing import Any

import torch
from tvm import relax, te, tirx

from relax_disc.frontend.converters.registry import axis_of, converts
from relax_disc.frontend.emitter import Emitter


@converts("aten.diagonal.default")
def diagonal(emitter: Emitter, x: Any, offset: int = 0, first: int = 0, second: int = 1) -> Any:
    """One diagonal of the matrices over two axes, as the last axis."""
    axes = axis_of(emitter, x, first), axis_of(emitter, x, second)

    def compute(a: Any, shape: Any) -> Any:
        def element(*i: Any) -> Any:
            others = list(i[:-1])
            place = []
            for axis in range(len(a.shape)):
                if axis == axes[0]:
                    place.append(i[-1] + max(-offset, 0))
                elif axis == axes[1]:
                    place.append(i[-1] + max(offset, 0))
                else:
                    place.append(others.pop(0))
            return a(*place)

        return te.compute(shape, element, name="diagonal")

    return emitter.te("diagonal", compute, x, relax.ShapeExpr(emitter.wanted_shape))


@converts("aten.diagonal_scatter.default")
def diagonal_scatter(
    emitter: Emitter, x: Any, source: Any, offset: int = 0, first: int = 0, second: int = 1
) -> Any:
    """A tensor with one diagonal replaced."""
    axes = axis_of(emitter, x, first), axis_of(emitter, x, second)

    def compute(a: Any, source: Any) -> Any:
        def element(*i: Any) -> Any:
            row, column = (i[axis] for axis in axes)
            others = [j for axis, j in enumerate(i) if axis not in axes]
            along = row - max(-offset, 0)
            on = tirx.all(column - row == offset, along >= 0, along < source.shape[-1])
            return tirx.if_then_else(on, source(*others, along), a(*i))

        return te.compute(a.shape, element, name="diagonal_scatter")

    return emitter.te("diagonal_scatter", compute, x, source)


@converts("aten.tril_indices.default", "aten.triu_indices.default")
def triangle_indices(
    emitter: Emitter, rows: Any, columns: Any, offset: int = 0, dtype: Any = None
) -> Any:
    """Positions in a triangle of a matrix of fixed size."""
    if not all(isinstance(x, int) for x in (rows, columns, offset)):
        raise emitter.refuse("a triangle's size must not depend on a dim")
    build = torch.tril_indices if "tril" in str(emitter.node.target) else torch.triu_indices
    found = build(rows, columns, offset, dtype=emitter.wanted.dtype)
    return emitter.emit(emitter.torch_constant(found))
