"""Hash all that the trace of an exported program depends on.

To trace gradients takes longer than to export.  Two exports with one fingerprint are traced to the
same function, so that the second can use what the first one led to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from relax_disc.frontend.capture.arguments import Argument
from relax_disc.frontend.capture.exported.export import Exported

_NAMESPACES = ("aten", "prim", "prims", "relax_disc")
_NESTING = ("wrap_with_autocast", "wrap_with_set_grad_enabled")
_PLAIN = (bool, int, float, complex, str, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _NotComparable(Exception):
    """Something may mean another thing in another process."""


def fingerprint(
    exported: Exported, arguments: Sequence[Argument], settings: Sequence[Any]
) -> str | None:
    """Hash an exported program, the tensors of its model and what else decides the function.

    The graph with all nested ones, shapes, source lines, conditions on sizes and dims count, and
    the values of constants that the code itself holds; sizes of the example and values of other
    tensors do not. SHA-256 in hexadecimal; None where the program calls code that is not known here
    (operators of other libraries, whose gradients run the user's code), or holds an object without
    a lasting name.
    """
    program = exported.program
    state = hashlib.sha256()
    try:
        for _, part in program.graph_module.named_modules():
            if isinstance(part, fx.GraphModule):
                for text in _graph(part):
                    state.update(text.encode() + b"\0")
        facts = [
            str(program.graph_signature),
            str(program.call_spec),
            _sizes(exported),
            str(exported.batch),
            [_argument(argument) for argument in arguments],
            _modes(),
            list(settings),
        ]
    except _NotComparable:
        return None
    state.update(json.dumps(facts).encode())
    return state.hexdigest()


def _graph(module: fx.GraphModule) -> Iterator[str]:
    """Write a graph down, node by node."""
    for node in module.graph.nodes:
        yield node.op
        yield node.name
        yield _target(node)
        yield _value(node.args)
        yield _value(node.kwargs)
        yield _value(node.meta.get("val"))
        yield node.meta.get("stack_trace") or ""


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        # A custom function's gradient is the user's code, which the graph does not show.
        known = target.namespace in _NAMESPACES and "custom_function" not in str(target)
        name = str(target)
    elif isinstance(target, HigherOrderOperator):
        name = target.name()
        known = name in _NESTING
    else:  # arithmetic on sizes, and the members of tuples
        home, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
        known = home in ("_operator", "math") or (home == "torch" and name.startswith("sym_"))
    if not known:
        raise _NotComparable
    return name


def _value(value: Any) -> str:
    """Write an argument of a node, or what it gives in the trace, down without ambiguity."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, _SYMBOLIC):
        return f"<{value.node.expr}>"
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, _NAMED):
        return str(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, slice):
        return f"slice{_value((value.start, value.stop, value.step))}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({','.join(map(_value, value))})"
    if isinstance(value, dict):
        return f"dict({','.join(f'{key!r}:{_value(part)}' for key, part in value.items())})"
    raise _NotComparable


def _tensor(tensor: Tensor) -> str:
    strides = _value(tuple(tensor.stride())) if tensor.layout is torch.strided else ""
    shape = _value(tuple(tensor.shape))
    facts = (tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad)
    return f"tensor{shape}{strides}{facts}"


def _argument(argument: Argument) -> list[Any]:
    tensor = argument.tensor
    values = ""
    if tensor is not None and argument.kind == "constant" and argument.outer is None:
        if tensor.layout is not torch.strided:
            raise _NotComparable
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        values = hashlib.sha256(flat.numpy().data).hexdigest()
    known = "" if tensor is None else _tensor(tensor)
    return [argument.name, argument.kind, argument.target, known, values]


def _sizes(exported: Exported) -> list[str]:
    """What was declared of the sizes, and what the export has found about them."""
    program = exported.program
    found = [
        str(sorted((str(symbol), str(r)) for symbol, r in program.range_constraints.items())),
        str(sorted(exported.dims.names.items())),
        str(sorted(exported.dims.specs.items())),
    ]
    fakes = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    env = next((f.fake_mode.shape_env for f in fakes if hasattr(f, "fake_mode")), None)
    if env is not None:
        found += [str(guard.expr) for guard in env.guards]
        found.append(str(sorted((str(k), str(v)) for k, v in env.replacements.items())))
        found.append(str(sorted(map(str, env.divisible))))
    return found


def _modes() -> list[str]:
    """Settings of PyTorch that its own decompositions look at."""
    kinds = ("cpu", "cuda")
    return [
        str(torch.get_default_dtype()),
        str([(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]),
        str(torch.are_deterministic_algorithms_enabled()),
        str(torch.is_inference_mode_enabled()),
    ]
