"""Convolutions of any spatial rank, grouped or not, and both their gradients; the library's.

Activations have their channels last, weights are PyTorch's ``[outer, inner / groups, *kernel]``.
A convolution leads from its inner side, the input, to its outer side; a transposed one is the
gradient of a convolution by its input, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import relax, tirx
from tvm.ir import Op, make_node

from relax_disc.ops import registry

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of a convolution from the inner to the outer side; one entry for each spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution(
    x: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr | None,
    shape: Sequence[Any],
    geometry: Geometry,
) -> relax.Call:
    """Build ``relax_disc.convolution``.

    ``x``: the inner side, ``[N, *P, C]``. ``weight``: ``[O, C / groups, *K]``. ``bias``: ``[O]``.
    ``shape``: extents of the result, the outer side: ``[N, *Q, O]``. ``geometry``: strides,
    padding, dilation, groups.
    """
    return _call("convolution", [x, weight, *([] if bias is None else [bias])], shape, geometry)


def convolution_input(
    grad: relax.Expr, weight: relax.Expr, shape: Sequence[Any], geometry: Geometry
) -> relax.Call:
    """Build ``relax_disc.convolution_input``: the inner side's gradient of extents ``shape``."""
    return _call("convolution_input", [grad, weight], shape, geometry)


def convolution_weight(
    grad: relax.Expr, x: relax.Expr, shape: Sequence[Any], geometry: Geometry
) -> relax.Call:
    """Build ``relax_disc.convolution_weight``: the weight's gradient of extents ``shape``."""
    return _call("convolution_weight", [grad, x], shape, geometry)


def _call(
    name: str, operands: list[relax.Expr], shape: Sequence[Any], geometry: Geometry
) -> relax.Call:
    attrs = make_node(
        "ir.DictAttrs",
        stride=list(geometry.stride),
        padding=list(geometry.padding),
        dilation=list(geometry.dilation),
        groups=geometry.groups,
    )
    # Strides and output padding leave the result's shape open: it is said, as for `call_tir`.
    kind = relax.TensorType(list(shape), registry.dtype_name(operands[0].ty))
    return relax.Call(Op.get(f"relax_disc.{name}"), operands, attrs, [kind])


def _infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    name = str(call.op.name)
    kinds = [argument.ty for argument in call.args[:2]]
    if len(call.ty_args) != 1 or not all(isinstance(kind, relax.TensorType) for kind in kinds):
        raise TypeError(f"{name}: two tensors and the result's type are wanted, got {call}.")
    if len({(kind.ndim, registry.dtype_name(kind)) for kind in (*kinds, call.ty_args[0])}) != 1:
        raise TypeError(f"{name}: operands of one rank and type are wanted, got {kinds}.")
    return call.ty_args[0]


for _name, _what in (
    ("convolution", "Convolution, channels last."),
    ("convolution_input", "Gradient of a convolution by its input."),
    ("convolution_weight", "Gradient of a convolution by its weight."),
):
    registry.register(f"relax_disc.{_name}", _infer, _what)


@registry.dispatches(
    "relax_disc.convolution", "relax_disc.convolution_input", "relax_disc.convolution_weight"
)
def dispatch(call: relax.Call, site: Site) -> relax.Expr:
    """Call the library: there is no other form."""
    name = call.op.name.removeprefix("relax_disc.")
    numbers = [
        *(int(n) for key in ("stride", "padding", "dilation") for n in call.attrs[key]),
        int(call.attrs["groups"]),
    ]
    operands = list(call.args)
    if len(operands) == 3:
        name = "convolution_bias"
    if name == "convolution_weight" and site.family == "relax_disc.cpu" and _is_own(call):
        name = "depthwise_weight"
    return site.call(name, [*operands, *numbers], site.original.ty)


def _is_own(call: relax.Call) -> bool:
    """Whether channels have windows of their own that PyTorch's library has no fast kernel for."""
    outer, inner = (registry.extents(arg.ty)[-1] for arg in call.args)
    kind: Any = call.ty_args[0]
    groups = int(call.attrs["groups"])
    window = registry.extents(kind)[2:]
    return (
        registry.dtype_name(kind) == "float32"
        and (len(window) == 1 or (len(window) == 2 and max(int(n) for n in window) > 3))
        and all(isinstance(n, tirx.IntImm) and int(n) == groups for n in (outer, inner))
    )


def _sides(which: int) -> Callable[[list[Any]], tuple[Any, Any, Any]]:
    """Inner side, outer side and weight among the views of a call; the result is the last."""
    if which == 0:
        return lambda views: (views[0], views[-1], views[1])
    if which == 1:
        return lambda views: (views[-1], views[0], views[1])
    return lambda views: (views[1], views[0], views[-1])


def _library(which: int) -> registry.LibraryFunction:
    sides = _sides(which)

    def flops(views: list[Any], numbers: list[int]) -> Any:
        _, outer, weight = sides(views)
        return 2 * registry.elements(outer.shape) * registry.elements(weight.shape[1:])

    def workspace(views: list[Any], numbers: list[int]) -> registry.Workspace:
        inner, outer, weight = sides(views)
        rank = len(weight.shape) - 2
        stride, padding, dilation = (numbers[k * rank : (k + 1) * rank] for k in range(3))
        spatial = [inner.shape[1:-1], outer.shape[1:-1], weight.shape[2:], stride]
        # One axis is seen as the second of two.
        lists = [(1, extents) for extents in spatial] + [(0, padding), (1, dilation)]
        flat = [n for one, extents in lists for n in ((one,) if rank == 1 else ()) + tuple(extents)]
        sizes = (inner.shape[0], inner.shape[-1], outer.shape[-1], numbers[3 * rank])
        return "convolution", (which, int(inner.dtype == "float16"), *sizes, *flat)

    def device_bytes(views: list[Any], numbers: list[Any], units: int) -> Any:
        """Bound the result and both forms of the weight; cuDNN's workspace is its own choice.

        ``aten/src/ATen/native/cudnn/Conv_v8.cpp`` of PyTorch 2.13 takes what the first plan of
        cuDNN's heuristics asks for that there is memory for.  No setting that is documented for
        that interface bounds it (``docs/cuda.md``).
        """
        del numbers, units
        weight = sides(views)[2]
        return registry.size_bytes(views[-1]) + 2 * registry.size_bytes(weight)

    return registry.LibraryFunction(
        flops=flops, workspace=workspace, device_bytes=device_bytes, takes_more=True
    )


registry.LIBRARY.update(
    convolution=_library(0),
    convolution_bias=_library(0),
    convolution_input=_library(1),
    convolution_weight=_library(2),
    depthwise_weight=registry.LibraryFunction(flops=_library(2).flops),
)
