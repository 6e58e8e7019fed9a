"""Write what is known about a captured function as JSON, and read it back.

Tuples, mappings, the dataclasses of `CapturedStep` and the structures of pytrees are written with
their kind; tensors are parts of their own, and what lies outside the function is written as paths.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
import tvm
from torch import nn
from torch.utils import _pytree as pytree

from relax_disc.errors import ArtefactError
from relax_disc.frontend import spec
from relax_disc.frontend.capture.batch_spec import BatchSpec
from relax_disc.frontend.capture.state.outer import (
    ABSENT,
    Guard,
    Layouts,
    Outer,
    OuterTensor,
    code_facts,
)
from relax_disc.frontend.capture.state.relied_on import is_comparable
from relax_disc.frontend.capture.state.sources import Place, Source, resolve
from relax_disc.frontend.spec import CapturedStep
from relax_disc.training.call.batch import device_of

_SCALARS = (type(None), bool, int, float, str)
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (*vars(spec).values(), BatchSpec)
    if isinstance(kind, type) and is_dataclass(kind)
}


def describe_captured(captured: CapturedStep) -> dict[str, Any]:
    """Describe a captured function, without its module and the values of tensors.

    Raises `ArtefactError`: the batch holds something besides tensors that JSON cannot, or a
    container that PyTorch cannot write down.
    """
    names = [str(spec.target) for spec in captured.inputs if spec.kind in ("constant", "number")]
    inputs = {name: captured.outer.inputs[name] for name in names}
    known = [guard for guard in captured.outer.guards if guard.source is not None]
    known = [g for g in known if g.part in ("", "same") or _literal(g.value) is not None]
    named = next((guard.names for guard in known if guard.names), frozenset())  # all have the same
    layouts = captured.outer.layouts
    return {
        "captured": _encode(replace(captured, module=None, outer=None)),
        "inputs": {
            name: [_path(x.source), x.is_number, list(x.tensor.shape), _dtype(x.tensor)]
            for name, x in inputs.items()
        },
        "guards": [[g.what, _path(g.source), *_value(g), g.part, bool(g.names)] for g in known],
        "names": sorted(named),
        "assigned": sorted(captured.outer.assigned),
        "written": sorted(captured.outer.written),
        "layouts": None if layouts is None else [layouts.where, [*layouts.strides.items()]],
    }


def restore_captured(facts: dict[str, Any], outer: Outer) -> CapturedStep:
    """Undo `describe_captured`; the module comes back empty, because its code is compiled.

    Raises `ArtefactError`: the batch's containers are not known to PyTorch here.
    """
    return replace(_decode(facts["captured"]), module=tvm.IRModule({}), outer=outer)


def constant_parts(captured: CapturedStep) -> dict[str, bytes]:
    """Return the values of the tensors that no path leads to, by name."""
    return {
        name: x.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, x in captured.outer.inputs.items()
        if x.source is None
    }


def restore_outer(
    facts: dict[str, Any],
    parts: Mapping[str, bytes],
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
) -> Outer:
    """Find what `describe_captured` wrote down on a model and a loss function, or in the parts.

    Raises `ArtefactError`: something is not there.
    """

    def place_of(
        path: list[str], may_be_absent: bool = False, is_lasting: bool = False
    ) -> tuple[Source, Place]:
        source = Source(path[0], ast.literal_eval(path[1]))
        try:
            return source, resolve(source, model, loss_fn, may_be_absent, is_lasting)
        except LookupError as error:
            reason = "pass that loss_fn to load" if loss_fn is None else "it is not there"
            raise ArtefactError(
                f"The saved step reads {source} of the model or of its loss_fn: {reason}."
            ) from error

    inputs, guards = {}, []
    for name, (path, is_number, shape, dtype) in facts["inputs"].items():
        source, place = (None, None) if path is None else place_of(path, is_lasting=True)
        if place is None:
            tensor = _tensor(parts[name], shape, getattr(torch, dtype)).to(device_of(model))
        else:
            tensor = torch.zeros((), dtype=torch.float64) if is_number else place.get()
        inputs[name] = OuterTensor(tensor, source, place, is_number)
    names = frozenset(facts["names"])
    for what, path, how, text, part, is_named in facts["guards"]:
        if how == "code" and loss_fn is None and path[0] == "loss_fn":
            continue  # it need not be given where it reads nothing
        source, place = place_of(path, how == "absent", is_lasting=part in ("form", "same"))
        if how == "literal":
            value: Any = ast.literal_eval(text)
        elif how == "same":
            value = place_of(text, is_lasting=True)
            if place.get() is not value[1].get():
                raise ArtefactError(
                    f"{what} was the same object as {value[0]} when the saved step was compiled: "
                    "let both lead to one before you load the step, or compile again."
                )
        else:
            value = ABSENT if how == "absent" else place.get()
            if how == "code" and _is_other_code(text, _code_text(value)):
                raise ArtefactError(
                    f"{what} is not what it was when the saved step was compiled: it was edited, "
                    "or another model or loss_fn is given. Compile again."
                )
            value = copy.copy(value) if how == "text" else value
        if how == "text" and text != (now := _text(value)):
            raise ArtefactError(
                f"{what} was {text} when the saved step was compiled and is {now} now: set it back "
                "before you load the step, or compile again."
            )
        shadow = _shadow(source, place, model, loss_fn)
        guards.append(
            Guard(what, source, place, value, shadow, part, names if is_named else frozenset())
        )
    layouts = facts["layouts"]
    if layouts is not None:
        where, strides = layouts
        layouts = Layouts(where, {k: s if s is None else tuple(s) for k, s in strides})
    return Outer(
        inputs, tuple(guards), layouts, *(frozenset(facts[key]) for key in ("assigned", "written"))
    )


def _shadow(
    source: Source, place: Place, model: nn.Module, loss_fn: Callable[..., Any] | None
) -> Any:
    """Return the instance's own attributes for one that its class has."""
    if not source.steps or source.steps[-1][0] != "attribute":
        return None
    own = vars(resolve(Source(source.root, source.steps[:-1]), model, loss_fn).get())
    return None if own is place.container or source.steps[-1][1] in own else own


def _value(guard: Guard) -> tuple[str, str | list[str] | None]:
    """Write what a guard compares with: how it is written, and the text.

    Functions, modules, other objects and lists that only lead to what was read are known by their
    paths alone.
    """
    value = guard.value
    if guard.part == "same":
        return "same", _path(value[0])
    if value is ABSENT:
        return "absent", None
    if isinstance(value, types.CodeType):
        return "code", _code_text(value)
    if not guard.part and (not is_comparable(value) or _is_link(guard)):
        return "path", None
    literal = _literal(value)
    return ("literal", literal) if literal is not None else ("text", _text(value))


def _code_text(code: types.CodeType) -> str:
    """Write code as the Python that made it, its version and ``-O``, and a hash."""
    version = ".".join(map(str, (*sys.version_info[:2], sys.flags.optimize)))
    return f"{version} {hashlib.sha256(repr(code_facts(code)).encode()).hexdigest()}"


def _is_other_code(was: str, now: str) -> bool:
    """Say whether code is another one, as far as that can be told: each Python makes its own."""
    return was.split()[0] == now.split()[0] and was != now


def _is_link(guard: Guard) -> bool:
    """Say whether a list, dict or set is meant itself: one that is compared is a copy."""
    try:
        is_itself = guard.place.get() is guard.value
    except (LookupError, ValueError):  # taken away since
        return False
    return is_itself and isinstance(guard.value, list | dict | set)


def _text(value: Any) -> str:
    """Write a value as a text that equal values share, in another process too."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"an array {value.dtype}{list(value.shape)} of hash {content}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({sorted(map(_text, value))})"
    if isinstance(value, np.ndarray):
        return f"an array of {_text(value.tolist())}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({[_text(part) for part in value]})"
    if isinstance(value, dict):
        return f"dict({[(_text(key), _text(part)) for key, part in value.items()]})"
    return repr(value)


def _path(source: Source | None) -> list[str] | None:
    """Write a path down.

    Raises `ArtefactError`: a key in it, an enum's member or a class, has no text that names it.
    """
    if source is None:
        return None
    steps = _literal(source.steps)
    if steps is None:
        raise ArtefactError(
            f"The step reads {source}, and such a key cannot be written into a file: use a text or "
            "a number as the key, and compile again."
        )
    return [source.root, steps]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _literal(value: Any) -> str | None:
    try:
        return text if ast.literal_eval(text := repr(value)) == value else None
    except (ValueError, SyntaxError, TypeError):  # the last of "{{}}", as of some object's repr
        return None


def _encode(value: Any) -> Any:
    """Write a value in what JSON can hold: itself, or its kind and its parts."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, tuple):
        return ["tuple", *map(_encode, value)]
    if isinstance(value, Mapping):
        return ["mapping", *([_encode(key), _encode(part)] for key, part in value.items())]
    if type(value).__name__ in _KINDS:
        parts = (getattr(value, field.name) for field in fields(value))
        return [type(value).__name__, *map(_encode, parts)]
    if isinstance(value, pytree.TreeSpec):
        try:
            return ["structure", pytree.treespec_dumps(value)]
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ArtefactError(
                f"The structure {value} cannot be saved: {error}. Register its containers with a "
                "serialized_type_name (torch.utils._pytree), or pass tuples and dicts."
            ) from error
    raise ArtefactError(
        f"The batch holds {value!r} of type {type(value).__name__}, which cannot be saved; only "
        "tensors, numbers, text, True, False and None can."
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == "tuple":
        return tuple(map(_decode, parts))
    if kind == "mapping":
        return {_decode(key): _decode(part) for key, part in parts}
    if kind in _KINDS:
        return _KINDS[kind](*map(_decode, parts))
    try:
        return pytree.treespec_loads(parts[0])
    except (KeyError, NotImplementedError, ValueError) as error:
        raise ArtefactError(
            f"The saved step's batch has containers that are not known here: {error}. Import the "
            "module that registers them before loading."
        ) from error


def _tensor(content: bytes, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    if not content:
        return torch.zeros(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone()
    return flat.view(dtype).reshape(shape)
