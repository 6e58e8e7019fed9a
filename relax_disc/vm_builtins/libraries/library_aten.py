"""`relax_disc.aten.call`: one of PyTorch's operators by a recipe (see `ops/aten.py`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import tvm_ffi


@functools.cache
def install() -> None:
    """Register the function, once per process."""
    tvm_ffi.register_global_func("relax_disc.aten.call", call, override=True)


def call(recipe: Any, *tensors: Any) -> None:
    """Run the operator of a recipe; the results come after the operands."""
    import torch

    operands = [torch.from_dlpack(t) if hasattr(t, "shape") else int(t) for t in tensors]
    with torch.no_grad():
        _prepared(str(recipe))(operands)


@functools.cache
def _prepared(text: str) -> Callable[[list[Any]], None]:
    import torch
    from torch.utils import _pytree as pytree

    recipe = json.loads(text)
    packet = functools.reduce(getattr, recipe["operator"].split("::"), torch.ops)
    operator = getattr(packet, recipe["overload"] or "default")
    schema = operator._schema.arguments

    def argument(encoded: Any, operands: list[Any]) -> Any:
        kind, *rest = encoded
        value = rest[0] if rest else None
        if kind == "operand":
            return operands[value]
        if kind == "complex":
            return torch.view_as_complex(operands[value])
        if kind == "scalar":
            return operands[value].item()
        if kind == "float":
            return float(value)
        if kind == "pair":
            return complex(float(value), float(rest[1]))
        if kind == "dtype":
            return getattr(torch, value)
        if kind == "device":
            return operands[-1].device
        if kind == "list":
            return [argument(item, operands) for item in value]
        return value

    results = recipe["results"]
    count = 1 + max(results)

    def run(operands: list[Any]) -> None:
        args, kwargs = [], {}
        for parameter, encoded in zip(schema, recipe["arguments"], strict=True):
            value = argument(encoded, operands)
            if parameter.kwarg_only:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        outs = operands[len(operands) - count :]
        found = pytree.tree_leaves(operator(*args, **kwargs))
        for place, value in zip(results, found, strict=True):
            if place >= 0:
                value = value.resolve_conj()
                outs[place].copy_(torch.view_as_real(value) if value.is_complex() else value)

    return run
