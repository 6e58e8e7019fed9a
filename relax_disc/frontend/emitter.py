"""Emit Relax bindings that carry the model's source line, for the converters.

A converter gets an `Emitter`, set to the node that it translates: it reads what PyTorch traced
(`Emitter.node`), builds Relax expressions, and emits them; names, spans and checks are done here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import tvm
from torch import fx
from tvm import relax, te, tirx
from tvm.ir import SourceName, Span

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.source_lines import SourceLine, source_line
from relax_disc.frontend.symbols import SymbolTranslator
from relax_disc.ops.operand_views import definition

_DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Name an element type as TVM does.

    Raises `UnsupportedOperatorError`: the type, complex or quantised say, has no counterpart here.
    """
    if dtype not in _DTYPES:
        raise UnsupportedOperatorError(
            f"Tensors of type {dtype} cannot be compiled; supported: "
            f"{', '.join(str(known) for known in _DTYPES)}."
        )
    return _DTYPES[dtype]


OPAQUE = 8
"""TVM's ``kOpaque``: a kernel with this ``op_pattern`` is not fused with others."""


def _is_symbolic_number(value: Any) -> bool:
    is_number = isinstance(value, relax.Expr) and isinstance(value.ty, tvm.ir.PrimType)
    return is_number and not isinstance(value, tirx.IntImm | tirx.FloatImm)


class Emitter:
    """Emits bindings into a Relax function; one instance serves one function.

    ``node``: the node being translated. ``symbols``: from PyTorch's sizes to TVM's.
    """

    def __init__(self, builder: relax.BlockBuilder, symbols: SymbolTranslator) -> None:
        self._builder = builder
        self.symbols = symbols
        self.node: Any = None
        self._span: Span | None = None
        self._name = "value"
        self._names: dict[str, int] = {}
        self._sources: dict[str, SourceName] = {}

    # -- where we are -------------------------------------------------------------------------

    def at(self, node: fx.Node) -> None:
        """Turn to ``node``: what is emitted now stems from it."""
        self.node = node
        self.locate(node.name, source_line(node))

    def locate(self, name: str, line: SourceLine) -> None:
        """Name what is emitted now, and give its line."""
        self._name = name
        self._span = None
        if line.file:
            source = self._sources.setdefault(line.file, SourceName(line.file))
            self._span = Span(source, line.line, line.line, 1, 1)

    def value(self, argument: Any) -> Any:
        """Return the fake value that PyTorch traced for an argument of the node."""
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    @property
    def wanted(self) -> Any:
        """The fake value, or tuple of them, that the node has in PyTorch."""
        return self.node.meta["val"]

    @property
    def wanted_shape(self) -> list[Any]:
        """Extents of the node's value."""
        return self.symbols.shape(self.wanted.shape)

    @property
    def counted_dim(self) -> Any:
        """The dim that the node counts, also where a trace has proved it equal to others."""
        (symbol,) = self.node.meta["unbacked_bindings"]
        return self.symbols.variable(symbol)

    @property
    def wanted_dtype(self) -> str:
        """Element type of the node's value."""
        return dtype_name(self.wanted.dtype)

    # -- what we emit -------------------------------------------------------------------------

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind an expression to a new variable."""
        if isinstance(expr, relax.Call) and self._span is not None:
            expr = relax.Call(expr.op, expr.args, expr.attrs, expr.ty_args, self._span)
        expr = self._builder.normalize(expr)
        count = self._names.get(self._name, 0)
        self._names[self._name] = count + 1
        name = self._name if count == 0 else f"{self._name}_{count}"
        var = relax.DataflowVar(name, expr.ty, self._span)
        self._builder.emit_normalized(relax.VarBinding(var, expr, self._span))
        return var

    def definition(self, expr: relax.Expr) -> relax.Expr:
        """Follow variables to what computes them."""
        return definition(expr, self._builder)

    def before_broadcast(self, x: relax.Expr) -> relax.Expr:
        """What a tensor is broadcast from along axes of the number one; else itself."""
        made: Any = self.definition(x)
        if not isinstance(made, relax.Call) or made.op.name != "relax.broadcast_to":
            return x
        source, shape = made.args[0], self.shape(x)
        ones = [isinstance(n, tirx.IntImm) and int(n) == 1 for n in self.shape(source)]
        rest = [1 if one else n for one, n in zip(ones, shape, strict=False)]
        return source if self.same_shape(self.shape(source), rest) else x

    def fields(self, call: relax.Call) -> tuple[relax.Var, ...]:
        """Emit a call that returns a tuple, and take the tuple apart."""
        return self.elements(self.emit(call))

    def elements(self, whole: relax.Var) -> tuple[relax.Var, ...]:
        """Take a tuple apart."""
        count = len(whole.ty.fields)
        return tuple(self.emit(relax.TupleGetItem(whole, k)) for k in range(count))

    def te(
        self,
        name: str,
        compute: Callable[..., Any],
        *args: Any,
        alone: bool = False,
        attrs: Mapping[str, Any] | None = None,
    ) -> relax.Var:
        """Emit a kernel written in TE; sizes that ``compute`` uses must be among ``args``.

        A kernel with a symbolic number among its arguments stays alone: FuseTIR mistakes the number
        when it fuses such a kernel with one whose extents are compound (``b * 4``). So does, if
        ``alone`` is set, a kernel written in loops, of which it mistakes the buffers.
        ``attrs``: further attributes of the kernel.
        """
        alone = alone or any(_is_symbolic_number(arg) for arg in args)
        attrs = {**(attrs or {}), **({"op_pattern": OPAQUE} if alone else {})}
        return self.emit(
            self._builder.call_te(
                compute, *args, primfunc_name_hint=name, primfunc_attrs=attrs or None
            )
        )

    def kernel(
        self, function: tirx.PrimFunc, name: str, args: Sequence[Any], out: Any
    ) -> relax.Var:
        """Emit a call of a PrimFunc; equal functions are added to the module once."""
        where = self._builder.add_func(function, name)
        return self.emit(relax.call_tir(where, relax.Tuple(list(args)), out))

    def channels_last(self, x: relax.Expr) -> relax.Var:
        """Move the channels of ``[n, c, *p]`` behind the others."""
        return self.emit(relax.op.permute_dims(x, [0, *range(2, len(self.shape(x))), 1]))

    def channels_first(self, x: relax.Expr) -> relax.Var:
        """Move the channels of ``[n, *p, c]`` to the second axis."""
        rank = len(self.shape(x))
        return self.emit(relax.op.permute_dims(x, [0, rank - 1, *range(1, rank - 1)]))

    def const(self, value: Any, dtype: str) -> relax.Expr:
        """Make a constant scalar."""
        return relax.const(value, dtype)

    def cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        """Convert the element type where it differs."""
        return x if self.dtype(x) == dtype else self.emit(relax.op.astype(x, dtype))

    def tensor(self, x: Any, dtype: str) -> relax.Expr:
        """Make an operand of type ``dtype`` of a tensor, a number or a symbolic number."""
        if isinstance(x, relax.Expr) and isinstance(x.ty, relax.TensorType):
            return self.cast(x, dtype)
        if isinstance(x, tirx.IntImm | tirx.FloatImm):
            x = x.value
        if isinstance(x, bool | int | float):
            return self.const(x, dtype)
        return self.te("size", lambda n: te.compute((), lambda: n.astype(dtype), name="size"), x)

    # -- what we know -------------------------------------------------------------------------

    def shape(self, x: relax.Expr) -> list[Any]:
        """List the extents of a tensor."""
        return list(x.ty.shape.values)

    def dtype(self, x: relax.Expr | relax.TensorType) -> str:
        """Name the element type of a tensor."""
        kind = x if isinstance(x, relax.TensorType) else x.ty
        return str(kind.dtype.dtype)

    def same_shape(self, left: Sequence[Any], right: Sequence[Any]) -> bool:
        """Say whether two shapes are proved equal."""
        return len(left) == len(right) and all(
            self.symbols.equal(a, b) for a, b in zip(left, right, strict=True)
        )

    def type_of(self, value: torch.Tensor) -> relax.TensorType:
        """Return the Relax type of a fake tensor; complex numbers are pairs along one more axis."""
        shape = self.symbols.shape(value.shape)
        if value.dtype.is_complex:
            return relax.TensorType(
                [*shape, tirx.IntImm("int64", 2)], dtype_name(value.dtype.to_real())
            )
        return relax.TensorType(shape, dtype_name(value.dtype))

    def torch_constant(self, value: torch.Tensor) -> relax.Expr:
        """Make a constant of a tensor's values."""
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        if value.dtype == torch.bfloat16:
            return relax.const(value.detach().float().numpy(), "bfloat16")
        return relax.const(value.detach().contiguous().numpy(), dtype_name(value.dtype))

    def check(self, result: Any, value: Any) -> None:
        """Compare what a converter made with what PyTorch traced, shapes by proof.

        Raises `UnsupportedOperatorError`: they differ, or cannot be proved equal: the converter
        does not fit this use.
        """
        if isinstance(value, torch.Tensor):
            expected, found = self.type_of(value), result.ty
            fits = (
                isinstance(found, relax.TensorType)
                and isinstance(found.shape, relax.ShapeExpr)
                and self.dtype(result) == self.dtype(expected)
                and self.same_shape(found.shape.values, expected.shape.values)
            )
            if not fits:
                raise self.refuse(f"its translation has the type {found}, not {expected}")
        elif isinstance(value, tuple | list):
            for part, fake in zip(result, value, strict=True):
                if part is not None and fake is not None:
                    self.check(part, fake)

    def refuse(self, why: str) -> UnsupportedOperatorError:
        """Make the error for a use of the node's operator that cannot be translated."""
        node, line = self.node, source_line(self.node)
        return UnsupportedOperatorError(
            f"{line}: {node.target} cannot be translated here: {why}.",
            ((str(node.target), str(line)),),
        )
