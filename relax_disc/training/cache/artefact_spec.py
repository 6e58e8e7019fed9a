"""Write what is known about a captured function as JSON, and read it back."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

import torch
import tvm
from torch import nn
from torch.utils import _pytree as pytree

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.errors import ArtefactError
from relax_disc.frontend.capture.batch_spec import BatchSpec
from relax_disc.frontend.capture.outer_state import Guard, Outer, OuterTensor
from relax_disc.frontend.capture.sources import Place, Source, resolve
from relax_disc.frontend.spec import (
    CapturedStep,
    DimSpec,
    IndexCheck,
    InputSpec,
    OutputSpec,
    SizeCheck,
    SizeOutput,
    UpdateGroup,
)
from relax_disc.training.call.batch import BatchLeaf, BatchSchema

_SCALARS = (type(None), bool, int, float, str)


def describe_captured(captured: CapturedStep, schema: BatchSchema) -> dict[str, Any]:
    """Describe a captured function and its batch, without its module and its constants' values.

    Raises
    ------
    ArtefactError
        The batch holds something besides tensors that JSON cannot, or a container that PyTorch
        cannot write down.
    """
    return {
        "inputs": [list(astuple(spec)) for spec in captured.inputs],
        "outputs": [list(astuple(spec)) for spec in captured.outputs],
        "dims": [list(astuple(spec)) for spec in captured.dims],
        "groups": [list(astuple(group)) for group in captured.update_groups],
        "structure": _dump_structure(captured.batch.structure),
        "parameters": list(captured.batch.parameters),
        "fixed": [[index, _scalar(value)] for index, value in captured.batch.fixed.items()],
        "extras": None if captured.extras is None else _dump_structure(captured.extras),
        "plain_extras": [
            [k, "size", value.expression]
            if isinstance(value, SizeOutput)
            else [k, "value", _scalar(value)]
            for k, value in captured.plain_extras.items()
        ],
        "constants": {
            name: [list(tensor.shape), _dtype_text(tensor.dtype)]
            for name, tensor in captured.constants.items()
        },
        "outer": _describe_outer(captured),
        "function": captured.function,
        "index_checks": [list(astuple(check)) for check in captured.index_checks],
        "size_checks": [list(astuple(check)) for check in captured.size_checks],
        "leaves": [_describe_leaf(leaf) for leaf in schema.leaves],
        "device": str(schema.device),
    }


def constant_parts(captured: CapturedStep) -> dict[str, bytes]:
    """Return the values of the tensors that no path leads to, by name."""
    return {
        name: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in captured.constants.items()
        if not _has_path(captured.outer.inputs.get(name))
    }


def restore_constants(
    facts: dict[str, Any], parts: Mapping[str, bytes], outer: Outer
) -> dict[str, torch.Tensor]:
    """Undo `constant_parts`, with what `describe_captured` and `restore_outer` say of them."""
    device = torch.device(facts["device"])
    return {
        name: outer.inputs[name].tensor
        if name in outer.inputs
        else _tensor(parts[name], shape, dtype).to(device)
        for name, (shape, dtype) in facts["constants"].items()
    }


def _has_path(outer: OuterTensor | None) -> bool:
    return outer is not None and outer.source is not None


def _describe_outer(captured: CapturedStep) -> dict[str, Any]:
    """Describe the paths to what is read besides; functions are known by their paths alone."""
    guards = [guard for guard in captured.outer.guards if guard.source is not None]
    return {
        "inputs": {
            name: [_describe_source(outer.source), outer.is_number]
            for name, outer in captured.outer.inputs.items()
            if outer.source is not None
        },
        "guards": [
            [guard.what, _describe_source(guard.source), _literal(guard.value)]
            for guard in guards
            if guard.source is not None
        ],
    }


def _describe_source(source: Source) -> list[str]:
    return [source.root, repr(source.steps)]


def _literal(value: Any) -> str | None:
    try:
        return text if ast.literal_eval(text := repr(value)) == value else None
    except (ValueError, SyntaxError):
        return None


def restore_outer(
    facts: dict[str, Any], model: nn.Module, loss_fn: Callable[..., Any] | None
) -> Outer:
    """Find what `describe_captured` wrote down on a model and a loss function.

    Raises
    ------
    ArtefactError
        Something is not there.
    """

    def place_of(described: list[str]) -> tuple[Source, Place]:
        source = Source(described[0], ast.literal_eval(described[1]))
        try:
            return source, resolve(source, model, loss_fn)
        except LookupError as error:
            reason = "pass that loss_fn to load" if loss_fn is None else "it is not there"
            raise ArtefactError(
                f"The saved step reads {source} of the model or of its loss_fn: {reason}."
            ) from error

    inputs, guards = {}, []
    for name, (described, is_number) in facts["outer"]["inputs"].items():
        source, place = place_of(described)
        tensor = torch.zeros((), dtype=torch.float64) if is_number else place.get()
        inputs[name] = OuterTensor(tensor, source, place, is_number)
    for what, described, literal in facts["outer"]["guards"]:
        source, place = place_of(described)
        value = place.get() if literal is None else ast.literal_eval(literal)
        guards.append(Guard(what, source, place, value))
    return Outer(inputs, tuple(guards))


def restore_captured(
    facts: dict[str, Any], constants: Mapping[str, torch.Tensor], outer: Outer
) -> tuple[CapturedStep, BatchSchema]:
    """Undo `describe_captured`; the module comes back empty, because its code is compiled.

    Parameters
    ----------
    facts : dict
        What `describe_captured` gave, through JSON.
    constants : mapping of str to torch.Tensor
        By name; may hold more than the function takes.
    outer : Outer
        What the function reads besides.

    Raises
    ------
    ArtefactError
        The batch's containers are not known to PyTorch here.
    """
    dims = tuple(DimSpec(*fields) for fields in facts["dims"])
    structure = _load_structure(facts["structure"])
    batch = BatchSpec(structure, dict(facts["fixed"]), tuple(facts["parameters"]))
    device = torch.device(facts["device"])
    captured = CapturedStep(
        module=tvm.IRModule({}),
        inputs=tuple(InputSpec(*(_tuples(field) for field in spec)) for spec in facts["inputs"]),
        outputs=tuple(OutputSpec(*fields) for fields in facts["outputs"]),
        dims=dims,
        batch=batch,
        constants={name: constants[name] for name in facts["constants"]},
        update_groups=tuple(
            UpdateGroup(*(_tuples(field) for field in group)) for group in facts["groups"]
        ),
        extras=None if facts["extras"] is None else _load_structure(facts["extras"]),
        plain_extras={
            k: SizeOutput(value) if kind == "size" else value
            for k, kind, value in facts["plain_extras"]
        },
        function=facts["function"],
        index_checks=tuple(IndexCheck(*_tuples(check)) for check in facts["index_checks"]),
        size_checks=tuple(SizeCheck(*_tuples(check)) for check in facts["size_checks"]),
        outer=outer,
    )
    ranges = tuple(SymbolicDim(dim.name, dim.lower, dim.upper) for dim in dims)
    leaves = tuple(_restore_leaf(leaf) for leaf in facts["leaves"])
    checks = captured.index_checks, captured.size_checks
    return captured, BatchSchema(batch, leaves, ranges, device, *checks)


def _describe_leaf(leaf: BatchLeaf) -> list[Any]:
    shape = [extent if isinstance(extent, int) else str(extent) for extent in leaf.shape]
    dtype = _dtype_text(leaf.dtype)
    return [leaf.name, leaf.position, shape, dtype]


def _restore_leaf(fields: list[Any]) -> BatchLeaf:
    name, position, shape, dtype = fields
    extents = tuple(SymbolicExpr.parse(n) if isinstance(n, str) else n for n in shape)
    return BatchLeaf(name, position, extents, getattr(torch, dtype))


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(content: bytes, shape: list[int], dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not content:
        return torch.zeros(shape, dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).clone().view(kind).reshape(shape)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _scalar(value: Any) -> Any:
    if type(value) not in _SCALARS:
        raise ArtefactError(
            f"The batch holds {value!r} of type {type(value).__name__}, which cannot be "
            "saved; only tensors, numbers, text, True, False and None can."
        )
    return value


def _dump_structure(structure: pytree.TreeSpec) -> str:
    try:
        return pytree.treespec_dumps(structure)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ArtefactError(
            f"The structure {structure} cannot be saved: {error}. Register its containers with a "
            "serialized_type_name (torch.utils._pytree), or pass tuples and dicts."
        ) from error


def _load_structure(text: str) -> pytree.TreeSpec:
    try:
        return pytree.treespec_loads(text)
    except (KeyError, NotImplementedError, ValueError) as error:
        raise ArtefactError(
            f"The saved step's batch has containers that are not known here: {error}. Import the "
            "module that registers them before loading."
        ) from error
