"""Tables of what is known of each operator, and its registration with TVM.

A file of this package says everything about one operator; the frontend, the passes and the analyses
look it up here.

TVM keeps operators in a table of the process and refuses a name that is there already, so
:func:`register` asks first: importing this package twice (``importlib.reload``) is harmless.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import tvm
from tvm import relax
from tvm.ir import Op, make_node, register_op_attr

InferType = Callable[[relax.Call, relax.BlockBuilder], tvm.ir.Type]

Keep = Callable[..., Any]
"""From the arguments of an ATen operator to its result by operators of ours; None: "not mine"."""

Dispatch = Callable[..., "relax.Expr | None"]
"""``rule(call, site)``: a library call for an operator's call; None: "not mine"."""

Workspace = tuple[str, tuple[Any, ...]]
"""A formula of the native library and its parameters, integers or expressions of the dims."""

DeviceBytes = Callable[[list[Any], list[Any], int], Any]
"""``bound(views, numbers, units)``: see `LibraryFunction.device_bytes`."""

SMALL_BYTES = 1 << 16
"""Of a call's smallest tensors, each of which PyTorch's allocator gives 512 bytes."""

SORT_BYTES = 1 << 20
"""Of the histograms of CUB's radix sort."""

KEPT: dict[Any, Keep] = {}
"""ATen operators that are traced whole where their rule says so, by overload."""

TRACED: dict[str, tuple[Callable[..., relax.Call], tuple[str, ...]]] = {}
"""Torch operators of ours: how their Relax call is built, the keywords of what is no tensor."""

DISPATCH: dict[str, list[Dispatch]] = {}
"""Relax operators that a library may compute: rules, the first that fits."""

LIBRARY: dict[str, LibraryFunction] = {}
"""Library functions by the last part of their name, such as ``"matmul"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFunction:
    """What plans know of a library function; views are its tensors, numbers its constants."""

    # ``flops(views, numbers)``: floating-point operations, for those that do much more than one
    # pass over their operands
    flops: Callable[[list[Any], list[int]], Any] | None = None
    # ``workspace(views, numbers)``: memory beside the arguments on the CPU
    workspace: Callable[[list[Any], list[int]], Workspace] | None = None
    # ``device_bytes(views, numbers, units)``: what PyTorch's kernels take from its allocator beside
    # the arguments at most, on a GPU of so many multiprocessors; numbers may be expressions here
    device_bytes: DeviceBytes | None = None
    # whether a library takes more there that nobody can tell before it runs
    takes_more: bool = False
    # arguments (input, output) where the output may be written over the input, on the CPU
    overwrites: frozenset[tuple[int, int]] = frozenset()


def kept(operator: Any) -> Callable[[Keep], Keep]:
    """Enter the rule by which an ATen operator is traced whole."""

    def enter(rule: Keep) -> Keep:
        KEPT[operator] = rule
        return rule

    return enter


class Kind(NamedTuple):
    """Shape and element type of a tensor of torch or of Relax."""

    shape: tuple[Any, ...]
    dtype: str

    @property
    def statistics(self) -> str:
        """Name the type in which sums over the tensor are kept."""
        return "float64" if self.dtype == "float64" else "float32"


Results = Callable[..., Iterable[tuple[Sequence[Any], str]]]
"""From kinds of the operands that are there, and all else by name, to shapes and types."""
"""From the kinds of operands that are there, and all numbers by name, to shapes and types."""

Gradient = tuple[Callable[..., Any], Callable[..., None]]
"""``backward`` and ``setup_context`` of `torch.library.register_autograd`."""

_PARAMETER = re.compile(r"(Tensor\??|float|bool|str|SymInt) (\w+)(?::(\d))?(?:=([^,)]+))?")
_NUMBERS = {"float": float, "bool": bool, "str": str, "SymInt": int}


def operator(
    schema: str,
    doc: str,
    results: Results,
    *,
    gradient: Gradient | None = None,
    choices: Mapping[str, Iterable[str]] = MappingProxyType({}),
    is_traced: bool = True,
) -> Callable[..., relax.Call]:
    """Register an operator of ours with TVM and torch; return what builds its call in Relax.

    ``schema``: as torch writes it, also with the ranks of tensors and defaults of what is none,
    such as ``"sum(Tensor x:2, SymInt axis=0) -> Tensor"``; the call takes these by keyword. A type
    that does not fit is a `TypeError`. ``choices``: of texts; another one is a `ValueError`.
    ``is_traced``: whether torch knows it; it never runs it.
    """
    name = schema.split("(", 1)[0]
    full, found = f"relax_disc.{name}", _PARAMETER.findall(schema)
    numbers = {key: _NUMBERS[kind] for kind, key, _, _ in found if kind in _NUMBERS}
    tensors = [
        (key, int(rank) if rank else None) for _, key, rank, _ in found if key not in numbers
    ]
    parameter = inspect.Parameter
    signature = inspect.Signature(
        [
            parameter(
                key,
                parameter.KEYWORD_ONLY if key in numbers else parameter.POSITIONAL_OR_KEYWORD,
                default=ast.literal_eval(text or "None")
                if text or "?" in kind
                else parameter.empty,
                annotation=numbers.get(key, relax.Expr),
            )
            for kind, key, _, text in found
        ]
    )

    def infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType | relax.TupleType:
        del builder
        types = (
            tensor_type(operand, f"{full}: {key}", rank)
            for operand, (key, rank) in zip(call.args, tensors, strict=False)
        )
        kinds = [Kind(tuple(extents(each)), dtype_name(each)) for each in types]
        attrs = dict(call.attrs.items()) if call.attrs else {}
        made = [relax.TensorType(list(shape), dtype) for shape, dtype in results(*kinds, **attrs)]
        return made[0] if len(made) == 1 else relax.TupleType(made)

    def fake(*args: Any) -> Any:
        given = [x for x in args[: len(tensors)] if x is not None]
        kinds = [Kind(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in given]
        values = dict(zip(numbers, args[len(tensors) :], strict=True))
        made = tuple(
            given[0].new_empty(shape, dtype=getattr(torch, dtype))
            for shape, dtype in results(*kinds, **values)
        )
        return made[0] if len(made) == 1 else made

    def build(*args: Any, **named: Any) -> relax.Call:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        values = bound.arguments
        for key, known in choices.items():
            if values[key] not in known:
                raise ValueError(f"{key} must be one of {tuple(known)}, got {values[key]!r}.")
        operands = [values[key] for key, _ in tensors if values[key] is not None]
        return call(full, operands, {key: kind(values[key]) for key, kind in numbers.items()})

    vars(build).update(__signature__=signature)
    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"Build ``{full}``: {doc}"
    register(full, infer, doc.split("\n", 1)[0])
    if is_traced:
        traced(_PARAMETER.sub(r"\1 \2", schema), fake, build, tuple(numbers), gradient)
    return build


def traced(
    schema: str,
    fake: Callable[..., Any],
    build: Callable[..., relax.Call] | None = None,
    keywords: Sequence[str] = (),
    gradient: Gradient | None = None,
) -> None:
    """Define a torch operator of ours, which is traced and never run by PyTorch.

    ``schema``: such as ``"sum(Tensor x) -> Tensor"``. ``fake``: from the operator's arguments to
    tensors with the shapes and types of its results. ``build``: ``build(*tensors, **keywords)``:
    its call in Relax; without it, a converter translates it. ``keywords``: what its last arguments
    are called, those that are no tensors.
    """
    name, signature = schema.split("(", 1)
    if not hasattr(torch.ops.relax_disc, name):
        full = f"relax_disc::{name}"
        torch.library.define(full, f"({signature}")
        torch.library.register_fake(full, fake)
        if gradient is not None:
            torch.library.register_autograd(full, gradient[0], setup_context=gradient[1])
    if build is not None:
        TRACED[f"relax_disc.{name}.default"] = build, tuple(keywords)


def dispatches(*operators: str) -> Callable[[Dispatch], Dispatch]:
    """Enter a rule by which libraries compute Relax operators."""

    def enter(rule: Dispatch) -> Dispatch:
        for operator in operators:
            DISPATCH.setdefault(operator, []).append(rule)
        return rule

    return enter


def elements(shape: Sequence[Any]) -> Any:
    """Product of extents."""
    return prod(shape)


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return tvm.DataType(dtype).itemsize


def size_bytes(view: Any) -> Any:
    """Bytes of a view."""
    return elements(view.shape) * itemsize(view.dtype)


def number(extent: Any) -> int:
    """Return an extent that is a number, whichever way it is written."""
    return extent if isinstance(extent, int) else extent.as_int()


def largest(first: Any, *others: Any) -> Any:
    """Return the largest of numbers or expressions."""
    if isinstance(first, int):
        numbers = [each for each in others if isinstance(each, int)]
        rest = [each for each in others if not isinstance(each, int)]
        top = max([first, *numbers])
        return top if not rest else rest[0].maximum(*rest[1:], top)
    return first.maximum(*others)


def register(name: str, infer_type: InferType, description: str) -> None:
    """Add the pure operator ``name`` to TVM's table, or update its type inference.

    ``name``: full name, such as ``"relax_disc.attention"``. ``infer_type``: maps a call to its
    type; raises ``TypeError`` when the arguments do not fit together. ``description``: one line
    that TVM shows for the operator.
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

    Raises `TypeError`: ``expr`` is no tensor with a known shape, or has another rank than ``rank``.
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
    return Kind((), dtype_name(kind)).statistics
