"""Address buffers by one flat index, so that fused loops keep simple addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.element import rewrite_loads
from relax_disc.analysis.kernels.half_precision import from_bfloat16_bits, to_bfloat16_bits

INDEX = "int64"
_BITS, _BYTE = "uint16", "uint8"

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
    """One-dimensional views of the parameters of a kernel, declared when first needed.

    With ``bits``, what is converted from bfloat16 as it is read, or to it as it is written, goes
    through a view as integers, and truth values go through one as bytes: TVM 0.27 miscounts the
    lanes of vectors that it converts itself, and addresses vectors of truth values as bits.
    """

    def __init__(self, bits: bool = False) -> None:
        self._views: dict[Any, Any] = {}
        self._bits = bits

    def declarations(self) -> list[Any]:
        """Statements that declare the views used so far."""
        return [tirx.DeclBuffer(view, data=of.data) for (of, _), view in self._views.items()]

    def view(self, buffer: Any, dtype: str | None = None) -> Any:
        """Return the flat view of a parameter, as elements of its type or of another."""
        key = buffer, dtype or str(buffer.dtype)
        if key not in self._views:
            name = f"{buffer.name}_flat" if dtype is None else f"{buffer.name}_bits"
            self._views[key] = tirx.decl_buffer((product(buffer.shape),), key[1], name)
        return self._views[key]

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
        if self._bits and str(buffer.dtype) == "bool":
            byte = tirx.BufferLoad(self.view(buffer, _BYTE), [self.address(buffer, indices)])
            return prim.NE(byte, tirx.const(0, _BYTE))
        return tirx.BufferLoad(self.view(buffer), [self.address(buffer, indices)])

    def store(self, buffer: Any, indices: Sequence[Any], value: Any) -> Any:
        """Write one element, converted to the buffer's type."""
        dtype = str(buffer.dtype)
        if self._bits and indices and dtype == "bfloat16" and str(value.ty.dtype) == "float32":
            bits = to_bfloat16_bits(value)
            return tirx.BufferStore(self.view(buffer, _BITS), bits, [self.address(buffer, indices)])
        if str(value.ty.dtype) != dtype:
            value = tirx.Cast(dtype, value)
        if self._bits and indices and dtype == "bool":
            byte = prim.Select(value, tirx.const(1, _BYTE), tirx.const(0, _BYTE))
            return tirx.BufferStore(self.view(buffer, _BYTE), byte, [self.address(buffer, indices)])
        if not indices:
            return tirx.BufferStore(buffer, value, [])
        return tirx.BufferStore(self.view(buffer), value, [self.address(buffer, indices)])

    def rewrite(self, expr: Any, mapping: Mapping[Any, Any]) -> Any:
        """Replace variables and read parameters through their flat views."""
        return rewrite_loads(expr, mapping, self.load, self._load_wide if self._bits else None)

    def _load_wide(self, buffer: Any, indices: Sequence[Any]) -> Any:
        if not indices:
            return self.load(buffer, indices)
        bits = tirx.BufferLoad(self.view(buffer, _BITS), [self.address(buffer, indices)])
        return from_bfloat16_bits(bits)
