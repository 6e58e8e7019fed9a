"""Translate a traced graph into one Relax function, operator by operator, checking each.

The function takes the batch, parameters, buffers, constants, optimizer states and hyper-parameters,
and returns the loss, the extra outputs and everything that the step changes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from tvm import relax

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend import fallback
from relax_disc.frontend.capture.arguments import Argument
from relax_disc.frontend.capture.refusals import refuse_complex
from relax_disc.frontend.capture.source_lines import source_line
from relax_disc.frontend.capture.traced.trace import Traced
from relax_disc.frontend.converters import TABLE
from relax_disc.frontend.emitter import Emitter, dtype_name
from relax_disc.frontend.index_checks import IndexChecks
from relax_disc.frontend.spec import InputSpec

_logger = logging.getLogger(__name__)

# Arguments of ATen operators that say where memory lies, not what is computed.
PLACEMENT = ("layout", "device", "pin_memory", "memory_format", "non_blocking")
_ASSERTIONS = ("aten._assert_async.default", "aten._assert_async.msg")
_IGNORED = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)


@dataclass(slots=True)
class Parameters:
    """The parameters of the function under construction, and what each is."""

    variables: list[relax.Var] = field(default_factory=list)
    specs: list[InputSpec] = field(default_factory=list)

    def add(self, spec: InputSpec, shape: Sequence[Any]) -> relax.Var:
        """Append one tensor."""
        var = relax.Var(spec.name, relax.TensorType(list(shape), spec.dtype))
        self.variables.append(var)
        self.specs.append(spec)
        return var


def refuse_unknown(traced: Traced) -> None:
    """Raise when the graph holds an operator that neither we nor PyTorch's own kernel can run.

    Raises `UnsupportedOperatorError`: lists every such operator with the line of the model that
    calls it.
    """
    found: dict[tuple[str, str], str] = {}
    for node in traced.graph.graph.nodes:
        if node.op != "call_function" or not _makes_tensors(node):
            continue
        name = str(node.target)
        if name in TABLE or name in (*_IGNORED, *_ASSERTIONS) or _is_getitem(node):
            continue
        if why := fallback.why_not(node):
            found[_origin(node), str(source_line(node))] = why
    if found:
        listing = "\n".join(f"  {name} at {line}: {why}" for (name, line), why in found.items())
        raise UnsupportedOperatorError(
            f"{len(found)} uses of operators cannot be translated:\n{listing}\n"
            "Nothing was compiled; replace them, or leave this part of the model to PyTorch.",
            tuple(found),
        )


def _origin(node: fx.Node) -> str:
    """Name the operator that the model calls, from which ``node`` was decomposed."""
    sources = node.meta.get("from_node") or []
    origin = str(sources[0].target) if sources else ""
    return f"{origin} ({node.target})" if origin not in ("", str(node.target)) else str(node.target)


def _makes_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if value is None:
        return str(node.target) not in _IGNORED
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def variable_name(text: str) -> str:
    """Turn a full name of the model into a name of a Relax variable."""
    name = re.sub(r"\W+", "_", text).strip("_")
    return name if name and not name[0].isdigit() else f"p_{name}"


def declare(traced: Traced, emitter: Emitter, parameters: Parameters) -> dict[fx.Node, Any]:
    """Declare the graph's own inputs as parameters of the function.

    Inputs that nothing reads are left out, but for the batch, which is always checked.
    """
    env: dict[fx.Node, Any] = {}
    nodes = [node for node in traced.graph.graph.nodes if node.op == "placeholder"]
    updated = {*traced.buffers, *traced.gradients}
    for index, (node, argument) in enumerate(zip(nodes, traced.arguments, strict=True)):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            _refuse_dynamic_number(value, argument)
            env[node] = value
        elif argument.kind == "constant" and _is_scalar(argument):
            emitter.locate(variable_name(str(argument.target)), source_line(node))
            assert argument.tensor is not None
            env[node] = emitter.torch_constant(argument.tensor)
        elif argument.kind in ("batch", "output_gradient") or node.users or index in updated:
            name = argument.name if isinstance(argument.target, int) else argument.target
            refuse_complex(value.dtype, argument.kind, name)
            shape = tuple(emitter.symbols.text(n) for n in value.shape)
            spec = _input_spec(argument, shape, dtype_name(value.dtype))
            env[node] = parameters.add(spec, emitter.symbols.shape(value.shape))
    return env


def _is_scalar(argument: Argument) -> bool:
    return argument.tensor is not None and argument.tensor.numel() == 1 and argument.outer is None


def _refuse_dynamic_number(value: Any, argument: Argument) -> None:
    if isinstance(value, torch.SymInt | torch.SymFloat):
        raise UnsupportedOperatorError(
            f"The argument {argument.name} is a number declared dynamic; pass it as a tensor, or "
            "leave it out of dynamic_shapes."
        )


def _input_spec(argument: Argument, shape: tuple[int | str, ...], dtype: str) -> InputSpec:
    name = argument.name if isinstance(argument.target, int) else argument.target
    return InputSpec(
        name=variable_name(name),
        kind=argument.kind,  # pyright: ignore[reportArgumentType]
        target=argument.target,
        state_key="",
        group=-1,
        shape=shape,
        dtype=dtype,
    )


def translate(
    traced: Traced, emitter: Emitter, env: dict[fx.Node, Any], checks: IndexChecks
) -> list[Any]:
    """Emit the whole graph; return its flat list of outputs.

    Raises `UnsupportedOperatorError`: a converter does not fit a use of its operator.
    """
    for node in traced.graph.graph.nodes:
        if node.op == "call_function":
            env[node] = _translate(node, emitter, env, checks)
        elif node.op == "get_attr":
            emitter.at(node)
            env[node] = emitter.emit(emitter.torch_constant(_attribute(traced.graph, node)))
        elif node.op == "output":
            return [_operand(x, env, emitter) for x in node.args[0]]
    raise AssertionError("a traced graph ends in an output")


def _attribute(graph: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    value: Any = graph
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _translate(
    node: fx.Node, emitter: Emitter, env: dict[fx.Node, Any], checks: IndexChecks
) -> Any:
    value = node.meta.get("val")
    if str(node.target) in _ASSERTIONS:
        emitter.at(node)
        checks.add_assertion(node, _operand(node.args[0], env, emitter))
        return value
    if str(node.target) in _IGNORED or not _makes_tensors(node):
        return value
    if _is_getitem(node):
        source: Any = node.args[0]
        return env[source][node.args[1]]
    emitter.at(node)
    args = checks.apply(node, [_operand(x, env, emitter) for x in node.args])
    kwargs = {
        key: _operand(x, env, emitter) for key, x in node.kwargs.items() if key not in PLACEMENT
    }
    return convert(emitter, args, kwargs)


def convert(emitter: Emitter, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Emit the emitter's node, whose tensors have become the operands given.

    Raises `UnsupportedOperatorError`: neither the node's converter nor PyTorch's own kernel fits.
    """
    node = emitter.node
    converter = TABLE.get(str(node.target))
    if _is_empty(node.meta["val"]):  # an extent of 0 means another thing to some of TVM's operators
        converter = TABLE["aten.empty.memory_format"]
    if converter is None or fallback.touches_complex(node):
        return fallback.call(emitter, args, kwargs)
    try:
        result = converter(emitter, *args, **kwargs)
        emitter.check(result, node.meta["val"])
    except UnsupportedOperatorError as error:
        return _by_pytorch(emitter, args, kwargs, error)
    except (TypeError, ValueError) as error:
        if not _takes_sizes(node):
            raise
        why = "it is given a size, or a number made of sizes, where it needs a plain number"
        refusal = emitter.refuse(why)
        refusal.__cause__ = error
        return _by_pytorch(emitter, args, kwargs, refusal)
    return result


def _is_empty(value: Any) -> bool:
    """Whether a value is a tensor without elements at every size."""
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and any(isinstance(n, int) and n == 0 for n in value.shape)


def _by_pytorch(
    emitter: Emitter, args: list[Any], kwargs: dict[str, Any], error: UnsupportedOperatorError
) -> Any:
    """Let PyTorch's own kernel run what has no converter, where it can; raises ``error``."""
    if fallback.why_not(emitter.node):
        raise error
    _logger.info("%s; PyTorch's own kernel runs it", error)
    return fallback.call(emitter, args, kwargs)


def _takes_sizes(node: fx.Node) -> bool:
    """Say whether numbers that differ between batches are among an operator's arguments."""
    values = [given.meta.get("val") for given in node.all_input_nodes]
    values += pytree.tree_leaves((node.args, node.kwargs))
    return any(isinstance(value, torch.SymInt | torch.SymFloat) for value in values)


def _operand(argument: Any, env: dict[fx.Node, Any], emitter: Emitter) -> Any:
    """Replace fx nodes by what they became; symbolic numbers by TVM expressions."""
    if isinstance(argument, fx.Node):
        argument = env.get(argument, argument.meta.get("val"))
    if isinstance(argument, torch.SymInt):
        return emitter.symbols.size(argument)
    if isinstance(argument, torch.SymFloat):
        return emitter.symbols.number(argument)
    if isinstance(argument, list | tuple):
        return [_operand(x, env, emitter) for x in argument]
    return argument
