"""Address buffers by one flat index, so that fused loops keep simple addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.element import rewrite_loads

INDEX = "int64"

# TVM 0.27 puts small buffers of this scope on the stack, where LLVM turns them into registers;
# those of scope "local" it takes from a pool, each time anew (10 times slower).
STACK = "global"


def index_const(value: int) -> Any:
    """Make a constant index."""
    return prim.IntImm(INDEX, value)


def product(extents: Sequence[Any]) -> Any:
    """Multiply extents; the empty product is 1."""
    total: Any = index_const(1)
    for extent in extents:
        total = total * as_index(extent)
    return total


def as_index(expr: Any) -> Any:
    """Widen an integer expression to the index type."""
    return expr if str(expr.ty.dtype) == INDEX else tirx.Cast(INDEX, expr)


class FlatBuffers:
    """One-dimensional views of the parameters of a kernel, declared when first needed."""

    def __init__(self) -> None:
        self._views: dict[Any, Any] = {}

    def declarations(self) -> list[Any]:
        """Statements that declare the views used so far."""
        return [tirx.DeclBuffer(view, data=buffer.data) for buffer, view in self._views.items()]

    def _view(self, buffer: Any) -> Any:
        if buffer not in self._views:
            self._views[buffer] = tirx.decl_buffer(
                (product(buffer.shape),), buffer.dtype, f"{buffer.name}_flat"
            )
        return self._views[buffer]

    @staticmethod
    def address(buffer: Any, indices: Sequence[Any]) -> Any:
        """Return the flat index of ``buffer[indices]``."""
        total: Any = index_const(0)
        stride: Any = index_const(1)
        for index, extent in zip(reversed(indices), reversed(buffer.shape), strict=True):
            total = as_index(index) * stride + total
            stride = stride * as_index(extent)
        return total

    def load(self, buffer: Any, indices: Sequence[Any]) -> Any:
        """Read one element."""
        if not indices:
            return tirx.BufferLoad(buffer, [])
        return tirx.BufferLoad(self._view(buffer), [self.address(buffer, indices)])

    def store(self, buffer: Any, indices: Sequence[Any], value: Any) -> Any:
        """Write one element."""
        if not indices:
            return tirx.BufferStore(buffer, value, [])
        return tirx.BufferStore(self._view(buffer), value, [self.address(buffer, indices)])

    def rewrite(self, expr: Any, mapping: Mapping[Any, Any]) -> Any:
        """Replace variables and read parameters through their flat views."""
        return rewrite_loads(expr, mapping, self.load)
