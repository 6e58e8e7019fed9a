"""Operators without a rule of ours run PyTorch's own kernel: which may, and how they are called.

What is needed is known from the trace: the results' types, and that the operator is a function of
its arguments alone.  Views are copied, complex tensors are float pairs along one more axis.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from tvm import relax, tirx

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.aten_workspace import scratch_bytes
from relax_disc.frontend.emitter import Emitter, dtype_name
from relax_disc.ops import aten

_RANDOM = "draws random numbers by PyTorch's generator, which cannot be drawn again"
_REFUSED_TAGS = {
    torch.Tag.nondeterministic_seeded: _RANDOM,
    torch.Tag.dynamic_output_shape: "the shape of its result depends on data",
    torch.Tag.data_dependent_output: "its result is a number that depends on data",
}
_BY_STRIDES = ("aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter")
_PLACEMENT = ("layout", "pin_memory", "memory_format", "generator")


def why_not(node: fx.Node) -> str:
    """Say why PyTorch's own kernel cannot serve a node; empty if it can.

    ``node``: a call, with the values that the trace found.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return "it is no operator of PyTorch"
    if (why := _why_not_operator(target)) and not _indexes_by_places(node):
        return why
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, Tensor) and (why := _why_not_tensor(value)):
            return f"its result {why}"
    for value in pytree.tree_leaves((node.args, node.kwargs)):
        value = value.meta.get("val") if isinstance(value, fx.Node) else value
        if isinstance(value, Tensor) and (why := _why_not_tensor(value)):
            return f"an operand {why}"
    if str(target.overloadpacket) in _BY_STRIDES:
        operand: Any = node.args[0]
        if not operand.meta["val"].is_contiguous():
            return "it reads by strides a tensor whose strides are not kept"
    return ""


@functools.cache
def _why_not_operator(target: OpOverload) -> str:
    if target._schema.is_mutable:
        return "it writes into its operands"
    for tag, why in _REFUSED_TAGS.items():
        if tag in target.tags:
            return why
    if "sparse" in target._schema.name or "quantize" in target._schema.name:
        return "it is no operator of plain tensors"
    return ""


def _indexes_by_places(node: fx.Node) -> bool:
    """Whether a node indexes by tensors of integers, whose shapes tell that of the result."""
    indices: Any = node.args[1] if node.target is torch.ops.aten.index.Tensor else ()
    tensors = [index.meta["val"] for index in indices if index is not None]
    return bool(tensors) and all(tensor.dtype is not torch.bool for tensor in tensors)


def _why_not_tensor(value: Tensor) -> str:
    if value.layout is not torch.strided:
        return "is sparse"
    if value.is_quantized:
        return "is quantised"
    try:
        dtype_name(value.dtype.to_real() if value.dtype.is_complex else value.dtype)
    except UnsupportedOperatorError:
        return f"is of type {value.dtype}"
    return ""


def touches_complex(node: fx.Node) -> bool:
    """Whether a complex tensor goes into a node or comes out of it."""
    values = [node.meta.get("val")]
    values += [
        arg.meta.get("val")
        for arg in pytree.tree_leaves((node.args, node.kwargs))
        if isinstance(arg, fx.Node)
    ]
    tensors = (value for value in pytree.tree_leaves(values) if isinstance(value, Tensor))
    return any(tensor.is_complex() for tensor in tensors)


def call(
    emitter: Emitter,
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    channels_last: bool = False,
    sizes_only: Sequence[str] = (),
) -> Any:
    """Emit the call of the emitter's node.

    ``emitter``: set to the node. ``args``, ``kwargs``: the node's, with Relax expressions in the
    place of tensors. ``channels_last``: store activations, ``[n, c, *p]`` with two or more spatial
    axes, as ``[n, *p, c]``. ``sizes_only``: parameters, of the first result's type, of which the
    operator reads no element.

    Raises `UnsupportedOperatorError`: the operator cannot be called so: see :func:`why_not`.
    """
    node = emitter.node
    if why := why_not(node):
        raise emitter.refuse(why)
    value = node.meta["val"]
    target: OpOverload = node.target
    if str(target) in ("aten.view_as_real.default", "aten.view_as_complex.default"):
        return args[0]  # float pairs already
    leaves, structure = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    places, count = [], 0
    for leaf in leaves:
        places.append(count if isinstance(leaf, Tensor) else -1)
        count += isinstance(leaf, Tensor)
    out = None
    if len(tensors) == len(leaves) and not any(t.is_complex() for t in tensors):
        out = _out_overload(target)
    recipe = aten.Recipe(target._schema.name, _overload_name(target), out, channels_last)
    for k, parameter in enumerate(target._schema.arguments):
        if parameter.name in sizes_only:
            recipe.arguments.append(["result", 0])
            continue
        if k < len(args) and not parameter.kwarg_only:
            fake, argument = node.args[k], args[k]
        elif parameter.name in kwargs:
            fake, argument = node.kwargs[parameter.name], kwargs[parameter.name]
        elif parameter.has_default_value():
            fake = argument = parameter.default_value
        else:
            fake = argument = None
        recipe.arguments.append(_argument(emitter, recipe, parameter, fake, argument))
    if channels_last:
        recipe.operands = [
            emitter.channels_last(x) if _is_activation(fake) else x
            for x, fake in zip(recipe.operands, recipe.fakes, strict=True)
        ]
        recipe.fakes, tensors = ([_stored(x) for x in list] for list in (recipe.fakes, tensors))
    scratch = scratch_bytes(emitter.symbols, recipe.text(places), recipe.fakes, tensors)
    types = [emitter.type_of(tensor) for tensor in tensors]
    made = emitter.emit(recipe.call(places, types, scratch))
    results = [made] if len(tensors) == 1 else list(emitter.elements(made))
    if channels_last:
        results = [
            emitter.channels_first(x) if _is_activation(fake) else x
            for x, fake in zip(results, tensors, strict=True)
        ]
    filled = [results[p] if p >= 0 else leaf for p, leaf in zip(places, leaves, strict=True)]
    return pytree.tree_unflatten(filled, structure)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 3


def _stored(value: Any) -> Any:
    """Permute an activation as it is stored with its channels last."""
    return value.permute(0, *range(2, value.dim()), 1) if _is_activation(value) else value


def _overload_name(target: OpOverload) -> str:
    name = target._overloadname
    return "" if name == "default" else name


@functools.cache
def _out_overload(target: OpOverload) -> str | None:
    """Name the overload that writes into given results, None where there is none."""
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    count = len(target._schema.returns)
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        inputs = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        outs = [a for a in other._schema.arguments if a.is_out]
        plain = all(str(a.type) == "Tensor" for a in outs)
        if len(outs) == count > 0 and plain and inputs == wanted:
            return _overload_name(other)
    return None


def _argument(
    emitter: Emitter, recipe: aten.Recipe, parameter: Any, fake: Any, argument: Any
) -> aten.Encoded:
    if parameter.name in _PLACEMENT:
        if parameter.name == "generator" and argument is not None:
            raise emitter.refuse("it is given a generator")
        return ["none"]
    if "Device" in str(parameter.real_type):
        return ["none"] if argument is None else ["device"]
    is_tensor = isinstance(argument, relax.Expr) and isinstance(argument.ty, relax.TensorType)
    if isinstance(parameter.real_type, torch.TensorType) and not is_tensor:
        wanted = pytree.tree_leaves(emitter.wanted)[0]
        if isinstance(argument, complex):
            fake = wanted.new_empty((), dtype=wanted.dtype.to_complex())
            parts = np.array([argument.real, argument.imag])
            number = relax.const(parts.astype(dtype_name(wanted.dtype.to_real())))
        else:  # of a complex tensor, too, a real number is one
            fake = wanted.new_empty((), dtype=wanted.dtype.to_real())
            number = emitter.tensor(argument, dtype_name(fake.dtype))
        argument = emitter.emit(number)
    return _encode(emitter, recipe, fake, argument)


def _encode(emitter: Emitter, recipe: aten.Recipe, fake: Any, argument: Any) -> aten.Encoded:
    if (encoded := aten.plain(argument)) is not None:
        return encoded
    if isinstance(argument, list | tuple):
        return [
            "list",
            [_encode(emitter, recipe, f, a) for f, a in zip(fake, argument, strict=True)],
        ]
    if isinstance(argument, tirx.IntImm):
        return ["int", int(argument)]
    if isinstance(argument, relax.Expr) and isinstance(argument.ty, relax.TensorType):
        tensor = emitter.value(fake)
        return recipe.operand("complex" if tensor.is_complex() else "operand", argument, tensor)
    if isinstance(argument, relax.Expr):
        if "float" in str(argument.ty):
            scalar = torch.empty((), dtype=torch.float64, device="meta")
            return recipe.operand("scalar", emitter.tensor(argument, "float64"), scalar)
        return recipe.operand("operand", argument, emitter.value(fake))
    raise emitter.refuse(f"an argument of type {type(argument).__name__} cannot be passed on")
