"""Register an operator with TVM and build calls of it.

TVM keeps operators in a table of the process and refuses a name that is there already, so
:func:`register` asks first: importing this package twice (``importlib.reload``) is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Op, make_node, register_op_attr

InferType = Callable[[relax.Call, relax.BlockBuilder], tvm.ir.Type]


def register(name: str, infer_type: InferType, description: str) -> None:
    """Add the pure operator ``name`` to TVM's table, or update its type inference.

    Parameters
    ----------
    name : str
        Full name, such as ``"relax_disc.attention"``.
    infer_type : callable
        Maps a call to its type; raises ``TypeError`` when the arguments do not fit together.
    description : str
        One line that TVM shows for the operator.
    """
    api = tvm.ir._ffi_api
    if name not in {str(known) for known in api.ListOpNames()}:
        api.RegisterOp(name, description)
        register_op_attr(name, "FPurity", True)
        register_op_attr(name, "TScriptPrinterName", name)
    api.OpSetAttrsTypeKey(Op.get(name), "ir.DictAttrs")
    api.OpResetAttr(Op.get(name), "FInferType")
    register_op_attr(name, "FInferType", infer_type)


def register_legalization(
    name: str, legalize: Callable[[relax.BlockBuilder, relax.Call], relax.Expr]
) -> None:
    """Let `LegalizeOps` turn calls of the operator ``name`` into kernels by ``legalize``."""
    tvm.ir._ffi_api.OpResetAttr(Op.get(name), "FLegalize")
    register_op_attr(name, "FLegalize", legalize)


def call(name: str, args: Sequence[relax.Expr], attrs: Mapping[str, object]) -> relax.Call:
    """Build a call of the operator ``name``; its type is inferred when it is emitted."""
    # Without attributes at all where there are none: TVM prints such a call by its name alone.
    kept = make_node("ir.DictAttrs", **attrs) if attrs else None
    return relax.Call(Op.get(name), list(args), kept)


def tensor_type(expr: relax.Expr, what: str, rank: int | None = None) -> relax.TensorType:
    """Return the tensor type of ``expr``, or raise when shape or rank is not known as asked.

    Raises
    ------
    TypeError
        ``expr`` is no tensor with a known shape, or has another rank than ``rank``.
    """
    kind = expr.ty
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        raise TypeError(f"{what} must be a tensor of known shape, got {kind}.")
    if rank is not None and len(kind.shape.values) != rank:
        raise TypeError(f"{what} must have rank {rank}, got {kind}.")
    return kind


def extents(kind: relax.TensorType) -> list[tvm.ir.Expr]:
    """List the extents of a tensor type of known shape."""
    assert isinstance(kind.shape, relax.ShapeExpr)
    return list(kind.shape.values)


def attribute(call: relax.Call, name: str) -> Any:
    """Return a parameter of an operator's call."""
    assert call.attrs is not None
    return call.attrs[name]


def dtype_name(kind: relax.TensorType) -> str:
    """Name the element type of a tensor type, such as ``"float32"``."""
    return str(kind.dtype.dtype if hasattr(kind.dtype, "dtype") else kind.dtype)


def statistics_dtype(kind: relax.TensorType) -> str:
    """Name the type in which sums over a tensor are kept: float32, or float64 for float64."""
    return "float64" if dtype_name(kind) == "float64" else "float32"
